#!/usr/bin/env bash
# Runs a static x86-64 Linux test binary on an emulated CPU with AVX-512 (F, CD, DQ, BW, VL), for machines that lack it.
#
#   RUSTFLAGS='-C target-feature=+crt-static' CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/tests/avx512.sh \
#     cargo test --release --target x86_64-unknown-linux-gnu -p kumiki-ops --lib simd::
#
# Needs Debian with root rights: it installs the emulator Bochs and boots Debian's cloud kernel in it with the binary as
# the only program. About 20 s to start, then some 30 million instructions a second; the guest's clock is not real time.
# Environment variables KUMIKI_*, RUST_* and PROPTEST_* reach the guest. Settings: AVX512_MEM (MiB), AVX512_TIMEOUT (s).
set -euo pipefail
memory=${AVX512_MEM:-1024} limit=${AVX512_TIMEOUT:-3600} ips=10000000
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kumiki-avx512
[ -f "${1-}" ] || { sed -n 2,10p "$0"; exit 2; }

packages=(bochs bochs-term bochsbios vgabios xorriso isolinux syslinux-common busybox-static cpio)
dpkg -s "${packages[@]}" >/dev/null 2>&1 || {
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"
} >&2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ ! -f "$cache/vmlinuz" ]; then
    mkdir -p "$cache"
    kernel=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\).*/\1/p' | head -1)
    (
        cd "$work"
        apt-get -q download "$kernel" >&2 2>/dev/null
        dpkg-deb --fsys-tarfile "$kernel"_*.deb | tar -xf - --wildcards './boot/vmlinuz-*'
    )
    mv "$work"/boot/vmlinuz-* "$cache/vmlinuz"
fi

# The guest's only files: busybox, the binary, and an init that runs it with its output on serial ports.
root=$work/root
mkdir -p "$root"/{bin,proc,sys,dev,tmp} "$work/iso"
cp /bin/busybox "$root/bin/"
cp "$1" "$root/prog"
shift
{
    echo '#!/bin/busybox sh
/bin/busybox --install -s /bin; export PATH=/bin HOME=/tmp RUST_BACKTRACE=1
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev; mount -t tmpfs t /tmp
for t in 1 2; do stty -F /dev/ttyS$t raw -echo 115200; done'
    while read -r name; do printf 'export %q\n' "$name=${!name}"; done < <(compgen -e | grep -E '^(KUMIKI|RUST|PROPTEST)_' || true)
    printf 'cd /tmp; /prog'
    for argument in "$@"; do printf ' %q' "$argument"; done
    echo ' </dev/null >/dev/ttyS1 2>/dev/ttyS2; code=$?
stty -F /dev/ttyS1 sane; stty -F /dev/ttyS2 sane; echo "@@EXIT $code"; stty -F /dev/ttyS0 sane; poweroff -f'
} >"$root/init"
chmod 755 "$root/init" "$root/prog"
(cd "$root" && find . | cpio -o -H newc --quiet >"$work/iso/initrd")
cp "$cache/vmlinuz" /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$work/iso/"
# clearcpuid: Bochs 2.7 reports a wrong compact XSAVE size, for which the kernel would give AVX up.
echo "DEFAULT l
LABEL l
  LINUX vmlinuz
  INITRD initrd
  APPEND console=ttyS0,115200 mitigations=off nokaslr audit=0 apparmor=0 random.trust_cpu=on clearcpuid=321,323,515,516 tsc_early_khz=$((ips / 1000)) lpj=$((ips / 250)) cryptomgr.notests panic=1 quiet" >"$work/iso/isolinux.cfg"
xorriso -as mkisofs -quiet -o "$work/boot.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table "$work/iso" 2>/dev/null

for i in 1 2 3; do
    echo "com$i: enabled=1, mode=file, dev=$work/com$i"
    : >"$work/com$i"
done >"$work/bochsrc"
echo "cpu: model=corei7_skylake_x, count=1, ips=$ips, reset_on_triple_fault=0
megs: $memory
romimage: file=/usr/share/bochs/BIOS-bochs-latest, options=fastboot
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path=$work/boot.iso, status=inserted
boot: cdrom
clock: sync=none
log: $work/log
sound: waveoutdrv=dummy, waveindrv=dummy, midioutdrv=dummy
panic: action=fatal
display_library: term" >>"$work/bochsrc"
# Debian's Bochs is a debugger build: without this it waits at its prompt.
echo continue >"$work/debugger"
TERM=vt100 timeout "$limit" script -qec "bochs -q -f $work/bochsrc -rc $work/debugger" /dev/null >"$work/screen" 2>&1 </dev/null || true

cat "$work/com2"
cat "$work/com3" >&2
code=$(tr -d '\r' <"$work/com1" | sed -n 's/.*@@EXIT \([0-9]*\).*/\1/p' | tail -1)
[ -n "$code" ] || { echo "no exit code (time-out or crash); the guest's console:"; tail -n 30 "$work/com1"; exit 125; } >&2
exit "$code"
