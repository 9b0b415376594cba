# Run by the small guest's /init: tells when SCSI disks come and go, then ends.
load sd_mod
echo sync > /sys/module/scsi_mod/parameters/scan
load virtio_scsi
# The kernel's own lines would come before.
dmesg -n 1
/husk-uevents $(cat /count)
# The benchmark still waits for the answer to the last removal.
sleep 1
poweroff -f
