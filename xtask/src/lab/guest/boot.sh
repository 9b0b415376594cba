# Run in the lab as it boots, before sshd: its key, network, modules and memory settings.
set -eu
. /run/husk-lab/config

mkdir -p -m 700 /root/.ssh
printf '%s\n' "$KEY" >/root/.ssh/authorized_keys

ip link set lo up
ip link set eth0 up
ip address add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2

modprobe -a kvm-amd tun vhost-net vhost-vsock
echo madvise >/sys/kernel/mm/transparent_hugepage/enabled
echo madvise >/sys/kernel/mm/transparent_hugepage/defrag
mkdir -p /sys/fs/cgroup/husk-lab
