#!/bin/bash
# Process 1 of the guest once its root is up. From the kernel command line: run=, python=, cache=.
for word in $(< /proc/cmdline); do
    case $word in
    run=*) run=${word#run=} ;;
    python=*) python=${word#python=} ;;
    cache=*) export XDG_CACHE_HOME=${word#cache=} ;; # the host's cache, which has the compiled modules
    esac
done
export PATH=$python:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/run TMPDIR=/run TERM=dumb PYTHONDONTWRITEBYTECODE=1
ulimit -l unlimited
ip link set lo up
mkdir -p /run/out
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 out /run/out
read -r up _ < /proc/uptime
echo "[guest $up] ready"
bash "$run"
code=$?
sync
echo "VM-EXIT-CODE: $code"
echo o > /proc/sysrq-trigger
read -r -t 5 _ < /dev/zero
