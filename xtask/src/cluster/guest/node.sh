# Makes the lab a node: node.sh NAME MAC ADDRESS HOST FILES CERTIFICATES PEERS CONTROL_PLANE ARCHIVE…
# The agent's init container installs Husk.
{
    set -eu
    name=$1 mac=$2 address=$3 host=$4 files=$5 certificates=$6 peers=$7 control_plane=$8
    shift 8

    for _ in $(seq 100); do
        nic=$(grep -l "^$mac\$" /sys/class/net/*/address 2>/dev/null | cut -d/ -f5) && [ "$nic" ] && break
        sleep 0.1
    done
    ip link set "$nic" up
    ip address add "$address/24" dev "$nic"
    for route in $ROUTES; do ip route add "${route%=*}" via "${route#*=}"; done
    sysctl -q -w net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
    modprobe -a nf_tables nf_conntrack br_netfilter
    ping -q -c 1 -W 10 "$host" >/dev/null

    mkdir -p /etc/containerd /etc/cni/net.d /run/systemd/system
    cp "$files/containerd.toml" /etc/containerd/config.toml
    cp "$files/10-husk.conflist" /etc/cni/net.d/

    # The units end with the lab.
    unit() {
        unit=$1
        shift
        systemd-run --quiet --unit "$unit" --property Delegate=yes --property KillMode=process \
            --property LimitNOFILE=1048576 --property Restart=always --property RestartSec=1 \
            --setenv "PATH=$path" "$@"
    }
    path=$peers/containerd:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    # A unit with a file: a transient one may be gone when its process has ended, and the installation restarts it.
    cat >/run/systemd/system/containerd.service <<END
[Service]
Type=notify
Environment="PATH=$path"
ExecStart="$peers/containerd/containerd"
Delegate=yes
KillMode=process
Restart=always
RestartSec=1
LimitNOFILE=1048576
TimeoutStartSec=300
END
    systemctl daemon-reload
    systemctl start containerd.service
    ctr() { "$peers/containerd/ctr" --namespace k8s.io "$@"; }
    until ctr version >/dev/null 2>&1; do sleep 0.2; done
    for archive; do ctr images import "$archive"; done

    unit kubelet "$peers/kubernetes/kubelet" --config "$files/kubelet.json" \
        --kubeconfig "$certificates/$name.kubeconfig" --hostname-override "$name" --node-ip "$address" \
        --cert-dir /var/lib/kubelet/pki
    unit kube-proxy "$control_plane/kube-proxy" --config "$files/kube-proxy.json"
    exit 0
}
