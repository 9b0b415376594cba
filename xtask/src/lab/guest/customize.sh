# Run by mmdebstrap on the building machine, $1 is the root tree: turns it into the lab's system.
set -eu
root=$1

printf 'husk-lab\n' >"$root/etc/hostname"
printf '127.0.0.1 localhost husk-lab\n::1 localhost\n' >"$root/etc/hosts"
printf 'nameserver 10.0.2.3\n' >"$root/etc/resolv.conf"
: >"$root/etc/fstab"
printf '0123456789abcdef0123456789abcdef\n' >"$root/etc/machine-id"

mkdir -p "$root/usr/local/lib/husk-lab"
cat >"$root/usr/local/lib/husk-lab/boot" <<'BOOT'
#!/bin/sh
# Before sshd: lets the holder of the key on the kernel's command line in, and sets up network, modules and memory.
# The folders of the host come later: see attach.sh.
set -eu
mkdir -p -m 700 /run/husk-lab /root/.ssh
sed -n 's/.*husk\.key=\([^ ]*\).*/\1/p' /proc/cmdline | base64 -d >/root/.ssh/authorized_keys
ip link set lo up
ip link set eth0 up
ip address add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2
modprobe -a kvm-amd tun vhost-net vhost-vsock virtiofs
echo madvise >/sys/kernel/mm/transparent_hugepage/enabled
echo madvise >/sys/kernel/mm/transparent_hugepage/defrag
mkdir -p /sys/fs/cgroup/husk-lab
BOOT
chmod 755 "$root/usr/local/lib/husk-lab/boot"

cat >"$root/etc/systemd/system/husk-lab.service" <<'UNIT'
[Unit]
Description=The lab's folders, network and modules
DefaultDependencies=no
After=local-fs.target
Before=ssh.service network.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/lib/husk-lab/boot
StandardOutput=journal+console
StandardError=journal+console
[Install]
WantedBy=multi-user.target
UNIT

# The clients are this machine's own commands, many at a time, on a loopback port.
cat >"$root/etc/ssh/sshd_config" <<'SSHD'
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 200
MaxSessions 200
LoginGraceTime 120
PerSourcePenalties no
PrintMotd no
SSHD
rm -f "$root"/etc/ssh/ssh_host_*
chroot "$root" ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key

mkdir -p "$root/etc/systemd/journald.conf.d" "$root/etc/systemd/system.conf.d"
printf '[Journal]\nStorage=volatile\nForwardToConsole=no\n' >"$root/etc/systemd/journald.conf.d/lab.conf"
printf '[Manager]\nDefaultTimeoutStartSec=120s\nDefaultTimeoutStopSec=10s\n' >"$root/etc/systemd/system.conf.d/lab.conf"
chroot "$root" systemctl -q enable husk-lab.service ssh.service
chroot "$root" systemctl -q mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer \
    e2scrub_all.timer e2scrub_reap.service systemd-timesyncd.service getty@tty1.service serial-getty@ttyS0.service \
    nftables.service nfs-server.service rpcbind.service rpcbind.socket systemd-networkd-wait-online.service \
    systemd-hwdb-update.service systemd-binfmt.service getty-static.service

# What they look for is not here.
mkdir -p "$root/etc/systemd/system-generators"
for generator in systemd-ssh-generator systemd-getty-generator systemd-gpt-auto-generator; do
    ln -sf /dev/null "$root/etc/systemd/system-generators/$generator"
done

# The initrd: only the disk's driver stands between the kernel and its root.
kernel=$(basename "$(echo "$root"/lib/modules/*)")
initrd=$root/tmp/initrd
mkdir -p "$initrd/bin" "$initrd/dev" "$initrd/proc" "$initrd/root" "$initrd/lib"
cp "$root/bin/busybox" "$initrd/bin/busybox"
modules=$(chroot "$root" modprobe --set-version "$kernel" --show-depends virtio_blk | sed -n 's/^insmod //p')
modules="$modules $(chroot "$root" modprobe --set-version "$kernel" --show-depends virtio_net | sed -n 's/^insmod //p')"
: >"$initrd/order"
for module in $modules; do
    name=$(basename "$module" .xz)
    [ ! -e "$initrd/lib/$name" ] || continue
    case $module in
    *.xz) chroot "$root" xz -dc "$module" >"$initrd/lib/$name" ;;
    *) cp "$root/$module" "$initrd/lib/$name" ;;
    esac
    echo "$name" >>"$initrd/order"
done
cat >"$initrd/init" <<'INIT'
#!/bin/busybox sh
busybox mount -t devtmpfs dev /dev
while read -r module; do busybox insmod "/lib/$module"; done </order
until [ -b /dev/vda ]; do busybox sleep 0.05; done
busybox mount -t ext4 -o noatime,discard /dev/vda /root
busybox mount -o move /dev /root/dev
exec busybox switch_root /root /sbin/init
INIT
chmod 755 "$initrd/init"
chroot "$root" sh -c 'cd /tmp/initrd && find . | cpio --quiet -o -H newc' >"$root/boot/lab-initrd"
rm -rf "$initrd"
cp "$root/boot/vmlinuz-$kernel" "$root/boot/lab-vmlinuz"
chmod 644 "$root/boot/lab-vmlinuz"
touch "$root/etc/.updated" "$root/var/.updated"
