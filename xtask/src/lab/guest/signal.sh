# Ends a command of run.sh: signal.sh ID SIGNAL sends SIGNAL to its process group. When the command has ended, or 5 s
# later, all that it has started is killed.
{
    id=$1 signal=$2
    state=/run/husk-lab/runs/$id
    group=/sys/fs/cgroup/husk-lab/$id
    pid=$(cat "$state/pid") || exit 1
    kill -s "$signal" -- "-$pid"
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        [ ! -e "$state/status" ] || break
        sleep 0.5
    done
    [ ! -d "$group" ] || echo 1 >"$group/cgroup.kill"
    exit 0
}
