# Gives eth0 its address and serves /www on port 80. The guest's /init runs it for the word `script`.
run net
cat > /lease <<'END'
#!/bin/busybox sh
case $1 in bound | renew) ;; *) exit 0 ;; esac
ip address replace "$ip/$mask" dev "$interface"
for address in $router; do ip route replace default via "$address" && break; done
END
chmod 755 /lease
if [ -e /sys/class/net/eth0 ]; then
    ip link set dev eth0 up && udhcpc -i eth0 -n -t 30 -T 1 -s /lease > /dev/null 2>&1
    mkdir -p /www
    cp /proc/sys/kernel/random/boot_id /www/boot-id
    httpd -h /www
    echo "husk-address:" $(ip -4 -o address show dev eth0 | tr -s ' ' | cut -d ' ' -f 4)
fi
