#!/bin/busybox sh
# /init of the guest: load modules, mount the host's root below a temporary overlay, continue in it.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
say() { read -r up _ < /proc/uptime; echo "[guest $up] $*"; }
for word in $($b cat /proc/cmdline); do
    case $word in next=*) next=${word#next=} ;; esac
done
while read -r module; do $b insmod "/mod/$module" || say "insmod $module failed"; done < /mod/boot.list
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro hostroot /lower || $b poweroff -f
$b mount -t tmpfs tmpfs /rw
$b mkdir -p /rw/upper /rw/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work overlay /newroot || $b poweroff -f
while read -r module; do
    case $module in
    dummy.ko) $b insmod "/mod/$module" numdummies=0 ;; # without it the module makes dummy0
    *) $b insmod "/mod/$module" || say "insmod $module failed" ;;
    esac
done < /mod/rdma.list
for name in proc sys dev; do
    $b mkdir -p "/newroot/$name"
    $b mount -o move "/$name" "/newroot/$name"
done
$b mount -t tmpfs tmpfs /newroot/run
$b mkdir -p /newroot/dev/shm /newroot/dev/pts
$b mount -t tmpfs tmpfs /newroot/dev/shm
$b mount -t devpts devpts /newroot/dev/pts
exec $b switch_root /newroot /bin/bash "$next"
