# Run by the small guest's /init: writes to memory, then answers on the serial line.
load virtio_scsi
# The kernel's own lines would come between the answers.
dmesg -n 1
stty raw -echo
/husk-answers $(cat /sizes)
