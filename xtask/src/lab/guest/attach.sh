# Run in the lab by ssh, once it has booted or has been restored: attach.sh CHECKOUT CACHE SECONDS.
# Sets the clock, and mounts the host's folders at their own paths. Only the share is writable in the lab.
set -eu
checkout=$1 cache=$2
# A restored lab has the time of its snapshot.
date -s "@$3" >/dev/null
printf "CHECKOUT='%s'\nCACHE='%s'\n" "$checkout" "$cache" >/run/husk-lab/config
for tag in checkout cache; do
    mkdir -p "/run/husk-lab/rw/$tag"
    tries=0
    # The kernel finds a device some time after it is plugged in.
    until mount -t virtiofs "$tag" "/run/husk-lab/rw/$tag" 2>/run/husk-lab/mount.log; do
        tries=$((tries + 1))
        if [ "$tries" = 300 ]; then
            cat /run/husk-lab/mount.log >&2
            exit 1
        fi
        sleep 0.1
    done
done
mkdir -p "$checkout" "$cache"
mount -o bind,ro /run/husk-lab/rw/checkout "$checkout"
mount -o bind,ro /run/husk-lab/rw/cache "$cache"
