# Makes a freshly installed root tree into what a Debian installer would have left on a disk.
# Run by sh on the building machine, with the tree as $1 and these set in front:
#   kernel    a regular expression of kernel packages; the newest but one is installed, and the newest
#             is left as a .deb in /root for an upgrade inside the guest. Empty: nothing to do.
#   root_id   UUID of the root filesystem
#   part_id   PARTUUID of its partition
#   esp_id    PARTUUID of the EFI system partition
#   partmap   msdos or gpt
#   loader    grub, or bls for an ESP with Boot Loader Specification entries
set -eu
root=$1
export DEBIAN_FRONTEND=noninteractive LC_ALL=C

inside() { chroot "$root" "$@"; }

if [ -n "$kernel" ]; then
    versions=$(inside apt-cache pkgnames linux-image- | grep -Ex "$kernel" | sort -V | tail -n 2)
    old=$(echo "$versions" | head -n 1)
    new=$(echo "$versions" | tail -n 1)
    [ "$old" != "$new" ] || { echo "the archive has one kernel like $kernel, an upgrade needs two" >&2; exit 1; }
    INITRD=No inside apt-get install -y --no-install-recommends "$old"
    inside sh -c "cd /root && apt-get download '$new'"
    rm -f "$root"/var/cache/apt/archives/*.deb
fi

echo localhost > "$root/etc/hostname"
echo "UUID=$root_id / ext4 errors=remount-ro 0 1" > "$root/etc/fstab"
[ ! -d "$root/etc/cloud" ] || cat > "$root/etc/cloud/cloud.cfg.d/90_datasource.cfg" <<'EOF'
datasource_list: [ NoCloud, None ]
locale: false
ssh_genkeytypes: [ ed25519 ]
EOF
rm -f "$root"/etc/ssh/ssh_host_*

# What a server does at night, and what waits for a network or a screen that may not be there.
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
    fstrim.timer man-db.timer getty@tty1.service systemd-networkd-wait-online.service; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done

inside systemctl -q enable systemd-networkd.service

inside update-initramfs -c -k all

case $loader in
grub)
    sed -i -e 's/^GRUB_TIMEOUT=.*/GRUB_TIMEOUT=0/' \
        -e 's/^GRUB_CMDLINE_LINUX_DEFAULT=.*/GRUB_CMDLINE_LINUX_DEFAULT=""/' \
        -e 's/^GRUB_CMDLINE_LINUX=.*/GRUB_CMDLINE_LINUX="console=ttyS0,115200"/' "$root/etc/default/grub"
    mkdir -p "$root/boot/grub/i386-pc"
    cp "$root"/usr/lib/grub/i386-pc/*.mod "$root"/usr/lib/grub/i386-pc/*.lst "$root"/usr/lib/grub/i386-pc/boot.img \
        "$root/boot/grub/i386-pc/"
    inside grub-editenv /boot/grub/grubenv create
    inside grub-mkimage -O i386-pc -o /boot/grub/i386-pc/core.img -p "(,${partmap}1)/boot/grub" \
        biosdisk "part_$partmap" ext2

    # update-grub asks grub-probe about the disk under /. There is none yet: answer in its place.
    part=${partmap}1
    mv "$root/usr/sbin/grub-probe" "$root/usr/sbin/grub-probe.real"
    cat > "$root/usr/sbin/grub-probe" <<EOF
#!/bin/sh
for word; do
    case \$word in
    --target=*) target=\${word#--target=} ;;
    -t) target= ;;
    *) [ -n "\${target-x}" ] || target=\$word ;;
    esac
done
case \$target in
device) echo /dev/vda1 ;;
fs_uuid) echo $root_id ;;
partuuid) echo $part_id ;;
fs) echo ext2 ;;
partmap) echo $partmap ;;
abstraction) ;;
drive) echo '(hd0,$part)' ;;
compatibility_hint) echo hd0,$part ;;
hints_string) echo --hint-bios=hd0,$part --hint-efi=hd0,$part --hint-baremetal=ahci0,$part ;;
*) exit 1 ;;
esac
EOF
    chmod 755 "$root/usr/sbin/grub-probe"
    mkdir -p "$root/dev/disk/by-uuid"
    : > "$root/dev/disk/by-uuid/$root_id"
    inside update-grub
    rm -r "$root/dev/disk"
    mv "$root/usr/sbin/grub-probe.real" "$root/usr/sbin/grub-probe"
    grep -q "root=UUID=$root_id " "$root/boot/grub/grub.cfg"
    ;;
bls)
    # kernel-install wants a filesystem of its own where the ESP will be mounted.
    echo "PARTUUID=$esp_id /boot/efi vfat umask=0077 0 1" >> "$root/etc/fstab"
    echo "root=PARTUUID=$part_id ro console=ttyS0,115200" > "$root/etc/kernel/cmdline"
    echo debian > "$root/etc/kernel/entry-token"
    mkdir -p "$root/boot/efi"
    root=$root unshare --mount sh -eu -c '
        mount -t tmpfs -o mode=700 esp "$root/boot/efi"
        export SYSTEMD_RELAX_ESP_CHECKS=1
        chroot "$root" bootctl install --esp-path=/boot/efi --no-variables --make-entry-directory=yes
        for image in "$root"/boot/vmlinuz-*; do
            version=${image#*/boot/vmlinuz-}
            chroot "$root" kernel-install --esp-path=/boot/efi add \
                "$version" "/boot/vmlinuz-$version" "/boot/initrd.img-$version"
        done
        chroot "$root" sh -eu -c "
            mkfs.vfat -C -F 32 -n ESP /var/tmp/esp.img 131072
            mcopy -s -Q -i /var/tmp/esp.img /boot/efi/* ::/
        "
    '
    ;;
esac

: > "$root/etc/machine-id"
rm -f "$root/var/lib/dbus/machine-id" "$root/etc/apt/sources.list"
touch "$root/etc/.updated" "$root/var/.updated"
