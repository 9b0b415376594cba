# Makes a small initramfs and takes the kernel out of a root tree. Run by sh on the building machine, with the
# tree as $1 and these set in front; leaves boot/$image/initrd, boot/vmlinuz, and boot/vmlinux, which is the same
# kernel unpacked.
#   image     name of the image
#   init      the text of its /init
#   programs  programs of the tree that go into its /bin, with the libraries they need
#   modules   kernel modules that go into its /lib beside those of every image
set -eu
root=$1
kernel=$(basename "$(echo "$root"/lib/modules/*)")
tree=$root/tmp/initramfs
rm -rf "$tree"
mkdir -p "$root/boot/$image"
mkdir -p "$tree/bin" "$tree/dev" "$tree/lib" "$tree/proc" "$tree/sys"
cp "$root/bin/busybox" "$tree/bin/busybox"
# /lib/NAME is the list of files to load for NAME, in order; empty if the kernel has it built in.
for name in virtio_pci virtio_blk virtio_scsi sd_mod sr_mod sg virtio_balloon virtio-rng \
    pvpanic-mmio pvpanic-pci button evdev $modules; do
    chroot "$root" modprobe --set-version "$kernel" --show-depends "$name" | sed -n 's/^insmod //p' |
        while read -r module; do
            file=$(basename "$module" .xz)
            case $module in
            *.xz) xz -dc "$root/$module" > "$tree/lib/$file" ;;
            *) cp "$root/$module" "$tree/lib/$file" ;;
            esac
            echo "$file"
        done > "$tree/lib/$name"
done
for program in $programs; do
    file=/usr/bin/$program
    [ -e "$root$file" ] || file=/usr/sbin/$program
    cp "$root$file" "$tree/bin/$program"
    # The tree's own ldd: this machine's would name this machine's libraries.
    libraries=$(chroot "$root" ldd "$file")
    case $libraries in *"not found"*) echo "$program: $libraries" >&2; exit 1 ;; esac
    for library in $(echo "$libraries" | sed -n 's|^[^/]*\(/[^ ]*\) (0x.*|\1|p'); do
        mkdir -p "$tree/${library%/*}"
        chroot "$root" cp -L "$library" "/tmp/initramfs$library"
    done
done
printf '%s' "$init" > "$tree/init"
chmod 755 "$tree/init"
chroot "$root" sh -c 'cd /tmp/initramfs && find . | sort | cpio --quiet --reproducible -o -H newc' > "$root/boot/$image/initrd"
if ! [ -e "$root/boot/vmlinux" ]; then
    cp "$root/boot/vmlinuz-$kernel" "$root/boot/vmlinuz"
    # Fields of Linux's boot protocol: setup_sects, payload_offset and payload_length.
    number() { od -An "-t$1" -j "$2" -N "${1#u}" "$root/boot/vmlinuz" | tr -d ' '; }
    start=$((($(number u1 497) + 1) * 512 + $(number u4 584)))
    # The last four bytes are the size.
    tail -c "+$((start + 1))" "$root/boot/vmlinuz" | head -c "$(($(number u4 588) - 4))" > "$root/tmp/payload"
    case $(od -An -tx1 -N4 "$root/tmp/payload") in
    " 02 21 4c 18") tool=lz4 ;;
    " 28 b5 2f fd") tool=zstd ;;
    " fd 37 7a 58") tool=xz ;;
    *) echo "$kernel is packed by an unknown program" >&2; exit 1 ;;
    esac
    chroot "$root" "$tool" -dc /tmp/payload > "$root/boot/vmlinux"
fi
