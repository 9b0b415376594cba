#!/bin/sh
# What udhcpc calls when something happens to its lease.
case "$1" in
bound | renew)
    ip link set dev "$interface" mtu "${mtu:-1500}"
    ip address flush dev "$interface"
    ip address add "$ip/$mask" dev "$interface"
    set -- ${staticroutes:-0.0.0.0/0 $router}
    while [ $# -ge 2 ]; do
        case "$2" in
        0.0.0.0) ip route add "$1" dev "$interface" ;;
        *) ip route add "$1" via "$2" dev "$interface" ;;
        esac
        shift 2
    done
    ;;
esac
