# Run by the small guest's /init: has the peer send and receive, one of /loads after the other, and tells on the console
# how much. Each line there is a name and the words of husk-netload; /net sets $guest and $peer.
. /net
load virtio_net
ip address add "$guest" dev eth0
ip link set eth0 up
# The kernel's own lines would come in between.
dmesg -n 1
ping -c 1 -w 20 "$peer" > /log 2>&1 || { cat /log; ip address; echo "husk-bench: failed;"; }
while read -r name words; do
    echo "husk-bench: begin $name;"
    if rate=$(/husk-netload $words 2> /log); then
        echo "husk-bench: result $name $rate;"
    else
        cat /log
        echo "husk-bench: failed;"
    fi
done < /loads
echo "husk-bench: done;"
# Firecracker ends its guest at a reset only.
grep -q reboot=k /proc/cmdline && reboot -f
poweroff -f
