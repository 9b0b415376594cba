# Runs one command in the lab: run.sh ID SHARE FOLDER COMMAND…
# The command sits in a cgroup of its own, so that it can be ended with all it started: by signal.sh, or here when
# the connection is lost. What it leaves running after a normal end stays.
# The braces make the shell read all of it first, so that it may be edited while it runs.
{
    set -u
    id=$1 share=$2 folder=$3
    shift 3
    state=/run/husk-lab/runs/$id
    group=/sys/fs/cgroup/husk-lab/$id
    mkdir -p "$state" "$group"
    echo $$ >"$state/pid"

    # The share may have been deleted and created again on the host since it was mounted.
    . /run/husk-lab/config
    inside=/run/husk-lab/rw/checkout${share#"$CHECKOUT"}
    (
        flock 9
        if ! [ "$share" -ef "$inside" ] || ! [ -w "$share" ]; then
            umount -l "$share" 2>/dev/null
            mount --bind "$inside" "$share"
        fi
    ) 9>/run/husk-lab/share.lock || exit 125
    cd "$folder" 2>/dev/null || cd "$share" || exit 125

    connection=$PPID
    (
        while [ -d "/proc/$connection" ]; do sleep 2; done
        echo 1 >"$group/cgroup.kill"
    ) </dev/null >/dev/null 2>&1 &
    watcher=$!
    # Signals to the whole process group are meant for the command.
    trap : INT TERM HUP
    sh -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' sh "$group" "$@"
    status=$?
    echo "$status" >"$state/status"
    kill "$watcher" 2>/dev/null
    rmdir "$group" 2>/dev/null
    exit "$status"
}
