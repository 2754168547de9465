"""AMX's kernels on an emulated Sapphire Rapids processor under Linux: for a developer whose processor has no tiles.

    python tests/kernels/amx_machine.py FOLDER [--python]

makes in FOLDER (1 GB) a machine of Bochs 3.0 with `bochs.patch` and Debian's kernel, boots it, and runs there
check_kernels.c and check_amx_linux.c, compiled without the plain-C tiles; `--python` runs amx_guest.py too: the built
extension, by the package and its contract tests. Exit code 0 when all agree. What it shows is equality and the dealings
with the kernel, no speed: an emulator counts a tile's product as one instruction.

Needs x86-64 Debian or Ubuntu, the network for the first run, and gcc g++ make patch cpio grub-pc-bin xorriso mtools.
Nothing is installed: packages are unpacked in FOLDER. The first run compiles Bochs (some 10 minutes of one core), a
later one takes a minute, with `--python` several.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "bitnet_ref" / "kernels" / "cpu"
MIRROR = "http://deb.debian.org/debian"
BOCHS = f"{MIRROR}/pool/main/b/bochs/bochs_3.0+dfsg.orig.tar.xz"
BOCHS_SHA256 = "78f6c73d4a6472d5130a87ab9dc306d02c7c71ed8e25b3a8ef642e2a7acd282b"
PACKAGES = ["bochsbios", "vgabios", "busybox-static"]  # and the kernel, whose name has its version
CONFIGURE = (
    "--with-nogui --without-x --disable-docbook --enable-all-optimizations --enable-x86-64 --enable-cpu-level=6 "
    "--enable-avx --enable-evex --enable-amx --enable-cet --enable-uintr --enable-protection-keys --enable-pci "
    "--enable-cdrom CXXFLAGS=-O2"
)
C_FLAGS = "-O3 -static -std=gnu11 -ffp-contract=off -pthread -Wno-psabi -Wno-unused-function"
# no5lvl: Bochs' BIOS does not return from system management mode with five levels of pages. ibt: nor does Linux start.
KERNEL_OPTIONS = (
    "console=ttyS0,115200 quiet nokaslr mitigations=off ibt=off no5lvl tsc=reliable lpj=4000000 random.trust_cpu=on"
)
END = "the machine is done: "


def call(command: str | list[str], cwd: Path, **options) -> str:
    """A command's output; SystemExit with it where it fails."""
    words = command.split() if isinstance(command, str) else command
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


def packages(folder: Path) -> Path:
    """Debian's kernel, BIOS and busybox, unpacked. apt's lists and cache are the folder's own."""
    root = folder / "packages"
    if (root / "boot").is_dir():
        return root
    for name in ("lists/partial", "cache/archives/partial", "sources"):
        (folder / "apt" / name).mkdir(parents=True, exist_ok=True)
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    source = f"Types: deb\nURIs: {MIRROR}\nSuites: trixie\nComponents: main\nSigned-By: {keyring}\n"
    (folder / "apt" / "sources" / "debian.sources").write_text(source)
    apt = folder / "apt"
    options = [f"-oDir::Etc::SourceParts={apt}/sources", "-oDir::Etc::SourceList=/dev/null", "-oAPT::Sandbox::User="]
    options += [f"-oDir::State::Lists={apt}/lists", f"-oDir::Cache={apt}/cache", "-oAPT::Architecture=amd64"]
    call(["apt-get", *options, "update"], apt)
    depends = call(["apt-cache", *options, "depends", "linux-image-cloud-amd64"], apt)
    kernel = next(line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line)
    call(["apt-get", *options, "download", kernel, *PACKAGES], apt)
    for package in sorted(apt.glob("*.deb")):
        call(["dpkg-deb", "-x", str(package), str(root)], apt)
    return root


def bochs(folder: Path) -> Path:
    """The emulator, compiled with bochs.patch"""
    program = folder / "bochs-3.0" / "bochs"
    patch = (HERE / "bochs.patch").read_bytes()
    applied = folder / "bochs-3.0" / "applied.patch"
    if program.exists() and applied.exists() and applied.read_bytes() == patch:
        return program
    archive = folder / "bochs.tar.xz"
    if not archive.exists():
        with urllib.request.urlopen(BOCHS) as response:
            archive.write_bytes(response.read())
    if hashlib.sha256(archive.read_bytes()).hexdigest() != BOCHS_SHA256:
        raise SystemExit(f"{archive} is not the file that {BOCHS} was: delete it and run again")
    shutil.rmtree(program.parent, ignore_errors=True)
    call("tar xf bochs.tar.xz", folder)
    with open(HERE / "bochs.patch") as text:
        call("patch -p1", program.parent, stdin=text)
    print("compiling Bochs ...", flush=True)
    call(f"./configure {CONFIGURE}", program.parent)
    call(["make", f"-j{os.cpu_count()}"], program.parent)
    applied.write_bytes(patch)
    return program


def copy_in(path: Path, root: Path) -> None:
    """A file to the same path under root, as old as it is (its .pyc says), and the links beside it that name it."""
    names = [path]
    if ".so" in path.name:
        names += [link for link in path.parent.iterdir() if link.is_symlink() and link.resolve() == path.resolve()]
    for name in names:
        target = root / name.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def python_files(root: Path, folder: Path) -> str:
    """All that amx_guest.py opens here, put into the machine. Returns the command that runs it there."""
    record = folder / "files.txt"
    guest = str(HERE / "amx_guest.py")
    print(call([sys.executable, guest, "--record", str(record)], HERE), flush=True)
    for line in record.read_text().splitlines():
        copy_in(Path(line), root)
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    for path in (loader, Path(sys.executable), Path(sys.prefix) / "pyvenv.cfg", Path(sys.executable).resolve()):
        if path.exists():
            copy_in(path, root)
    folders = sorted({str(Path(line).parent) for line in record.read_text().splitlines() if ".so" in Path(line).name})
    libraries = ":".join(folder for folder in folders if "site-packages" not in folder)
    path = ":".join(entry for entry in sys.path if os.path.exists(entry))
    variables = f"PYTHONHOME={sys.base_prefix} PYTHONPATH={path} LD_LIBRARY_PATH={libraries} BITNET_REF_SIMD=amx"
    variables += " OPENBLAS_CORETYPE=Haswell"  # its kernels for this processor use what Bochs does not know
    return f"{variables} {Path(sys.executable).resolve()} -X faulthandler {guest}"


def image(folder: Path, root_packages: Path, with_python: bool) -> Path:
    """A bootable CD: the kernel, and an initial RAM disk that is the whole system"""
    root, cd = folder / "root", folder / "cd"
    for old in (root, cd):
        shutil.rmtree(old, ignore_errors=True)
    for name in ("bin", "proc", "sys", "dev", "tmp"):
        (root / name).mkdir(parents=True)
    busybox = next(path for path in root_packages.rglob("bin/busybox") if path.is_file())
    shutil.copy2(busybox, root / "bin" / "busybox")
    for program in ("check_kernels", "check_amx_linux"):
        source = str(HERE / f"{program}.c")
        call(["gcc", *C_FLAGS.split(), f"-I{KERNELS}", source, "-o", str(root / "bin" / program), "-lm"], folder)
    commands = ["/bin/check_kernels 10", "/bin/check_amx_linux"]
    if with_python:
        commands.append(python_files(root, folder))
    script = ["#!/bin/busybox sh", "b=/bin/busybox", "export HOME=/tmp PYTHONDONTWRITEBYTECODE=1", "bad=0"]
    script += [
        f"$b mount -t {kind} {kind} /{at}" for kind, at in (("proc", "proc"), ("sysfs", "sys"), ("devtmpfs", "dev"))
    ]
    script += ["exec > /dev/ttyS0 2>&1", "echo Linux $($b uname -r), $($b grep -m1 'model name' /proc/cpuinfo)"]
    script += [f"{command} || bad=1" for command in commands]
    script += ["[ $bad = 0 ] || $b dmesg | $b tail -n 5"]  # which instruction a program died of
    script += [f'echo "{END}$bad"', "$b poweroff -f"]
    (root / "init").write_text("\n".join(script) + "\n")
    (root / "init").chmod(0o755)
    (cd / "boot" / "grub").mkdir(parents=True)
    shutil.copy2(next((root_packages / "boot").glob("vmlinuz-*")), cd / "boot" / "vmlinuz")
    with open(cd / "boot" / "initrd", "wb") as out:
        files = subprocess.run(["find", "."], cwd=root, capture_output=True, check=True).stdout
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, input=files, stdout=out, check=True)
    menu = f"set timeout=0\nlinux /boot/vmlinuz {KERNEL_OPTIONS}\ninitrd /boot/initrd\nboot\n"
    (cd / "boot" / "grub" / "grub.cfg").write_text(menu)
    call("grub-mkrescue -o machine.iso cd --compress=no", folder)
    return folder / "machine.iso"


def boot(folder: Path, program: Path, root_packages: Path, timeout_s: float) -> int:
    """Runs the machine and shows its serial port. Returns 0, 1 for a check that failed, 2 for no answer."""
    share = root_packages / "usr" / "share"
    serial = folder / "serial.txt"
    serial.unlink(missing_ok=True)
    (folder / "bochsrc").write_text(
        "display_library: nogui\nmemory: guest=1024, host=1024\n"
        "cpu: model=sapphire_rapids, ips=100000000, reset_on_triple_fault=0\n"
        f"romimage: file={share}/bochs/BIOS-bochs-latest\nvgaromimage: file={share}/vgabios/vgabios.bin\n"
        f"ata0-master: type=cdrom, path={folder}/machine.iso, status=inserted\nboot: cdrom\n"
        f"com1: enabled=1, mode=file, dev={serial}\nlog: {folder}/bochs.log\n"
        "panic: action=fatal\nerror: action=report\ninfo: action=ignore\ndebug: action=ignore\nclock: sync=none\n"
    )
    start, shown = time.monotonic(), 0
    with open(folder / "bochs.out", "wb") as out:
        machine = subprocess.Popen(
            [str(program), "-q", "-f", "bochsrc"], cwd=folder, stdin=subprocess.DEVNULL, stdout=out
        )
        try:
            while True:
                ended = machine.poll() is not None or time.monotonic() - start > timeout_s
                text = serial.read_text(errors="replace").replace("\r", "") if serial.exists() else ""
                print(text[shown:], end="", flush=True)
                shown = len(text)
                if END in text and "\n" in text.split(END)[1]:
                    print(f"{time.monotonic() - start:.0f} s")
                    return int(text.split(END)[1].split()[0])
                if ended:
                    print(f"\nno answer from the machine in {time.monotonic() - start:.0f} s: see {folder}/bochs.log")
                    return 2
                time.sleep(0.5)
        finally:
            machine.kill()
            machine.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="store_true", help="run the built extension by the package, too")
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="for the machine's run")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for tool in ("gcc", "g++", "make", "patch", "cpio", "grub-mkrescue", "xorriso", "mformat", "apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is missing: apt install gcc g++ make patch cpio grub-pc-bin xorriso mtools")
    program, root_packages = bochs(folder), packages(folder)
    image(folder, root_packages, options.python)
    return boot(folder, program, root_packages, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
