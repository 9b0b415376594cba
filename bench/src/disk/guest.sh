# Run by the small guest's /init: measures its first disk as /jobs says, and tells on the console.
load virtio_blk
load sd_mod
load virtio_scsi
tries=0
until [ -b /dev/vda ] || [ -b /dev/sda ] || [ $tries = 100 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
export DISK=/dev/vda
[ -b $DISK ] || DISK=/dev/sda
# What is compared is devices, not what the kernel puts before each kind of them.
echo none > /sys/block/${DISK#/dev/}/queue/scheduler
echo "husk-bench: disk $DISK $(cat /sys/block/${DISK#/dev/}/size);"
mkdir -p /tmp
cd /tmp
if fio --output=result --output-format=terse --terse-version=3 /jobs > log 2>&1; then
    # Only what jobs have done: fio also tells there of what it runs before them.
    sed -n 's/^3;/husk-bench: result 3;/p' result
    echo "husk-bench: done;"
else
    cat log result
    echo "husk-bench: failed;"
fi
# Firecracker ends its guest at a reset only.
grep -q reboot=k /proc/cmdline && reboot -f
poweroff -f
