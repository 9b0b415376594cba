#!/bin/sh
# What udhcpc calls when something happens to its lease: leaves what it was told in /lease.DEVICE, and does it.
# The shell has a command of this name itself.
ip() { /bin/ip "$@"; }
case $1 in
bound) ;;
renew)
    { echo "event=renew"; env; } > "/lease.$interface"
    exit
    ;;
*) exit ;;
esac
[ -z "$mtu" ] || ip link set dev "$interface" mtu "$mtu"
ip -4 address flush dev "$interface"
ip address add "$ip/$mask" dev "$interface"
set -- ${staticroutes:-${router:+0.0.0.0/0 $router}}
while [ $# -ge 2 ]; do
    case $2 in
    0.0.0.0) ip route add "$1" dev "$interface" scope link ;;
    *) ip route add "$1" via "$2" dev "$interface" ;;
    esac
    shift 2
done
{ echo "event=bound"; env; } > "/lease.$interface"
