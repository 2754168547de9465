/* A library for LD_PRELOAD that lets one system call fail: the n-th that concerns a file below a folder.

   fault_arm(root, error, n): from now on count the calls on files below `root` (an absolute path without links), and
   let the n-th fail with `error`; n = 0 only counts. An error of -1 stands for a short write: the n-th call that writes
   more than one byte writes half of it. fault_calls() -> the calls counted since; fault_name() -> the one that failed.

   Compared with strace: all calls of the writers are seen but getdents, ioctl, fcntl, and what opendir and closedir do
   inside the C library. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static const char *failed = "";
static int armed, wanted, error_number;
static int calls;

void fault_arm(const char *folder, int error, int n) {
    snprintf(root, sizeof root, "%s", folder);
    armed = 1, error_number = error, wanted = n, failed = "";
    __atomic_store_n(&calls, 0, __ATOMIC_SEQ_CST);
}
void fault_disarm(void) { armed = 0; }
int fault_calls(void) { return calls; }
const char *fault_name(void) { return failed; }

static int below(const char *path) {
    size_t length = strlen(root);
    return strncmp(path, root, length) == 0 && (path[length] == 0 || path[length] == '/');
}

static int below_fd(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t (*next)(const char *, char *, size_t) = dlsym(RTLD_NEXT, "readlink");
    ssize_t size = next(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return below(path);
}

static int below_at(int fd, const char *path) {
    if (path == NULL || path[0] == 0) return fd >= 0 && below_fd(fd);
    return path[0] == '/' || fd == AT_FDCWD ? below(path) : below_fd(fd);
}

/* Whether this call is the one to fail. `size`: the bytes that a call writes, else -1. */
static int fails(const char *name, int concerned, long size) {
    if (!armed || !concerned || (error_number == -1 && size < 2)) return 0;
    if (__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) != wanted) return 0;
    failed = name;
    return 1;
}

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define WRAP(type, name, parameters, concerned, call)                                                                  \
    type name parameters {                                                                                             \
        int before = errno, fail = armed && fails(#name, concerned, -1);                                               \
        if (fail) { errno = error_number; return (type)-1; }                                                           \
        errno = before;                                                                                                \
        NEXT(name);                                                                                                    \
        return next call;                                                                                              \
    }
#define WRAP_WRITE(name, parameters, fd, size, call, half)                                                             \
    ssize_t name parameters {                                                                                          \
        int before = errno, fail = armed && fails(#name, below_fd(fd), (long)(size));                                  \
        if (fail && error_number != -1) { errno = error_number; return -1; }                                           \
        errno = before;                                                                                                \
        NEXT(name);                                                                                                    \
        if (fail) return next half;                                                                                    \
        return next call;                                                                                              \
    }
#define WRAP_OPEN(name, parameters, concerned, last, with_mode)                                                        \
    int name parameters {                                                                                              \
        mode_t mode = 0;                                                                                               \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, last); mode = va_arg(list, mode_t); va_end(list); } \
        int before = errno;                                                                                            \
        if (armed && fails(#name, concerned, -1)) { errno = error_number; return -1; }                                 \
        errno = before;                                                                                                \
        NEXT(name);                                                                                                    \
        return next with_mode;                                                                                         \
    }

WRAP_OPEN(open, (const char *path, int flags, ...), below(path), flags, (path, flags, mode))
WRAP_OPEN(open64, (const char *path, int flags, ...), below(path), flags, (path, flags, mode))
WRAP_OPEN(openat, (int fd, const char *path, int flags, ...), below_at(fd, path), flags, (fd, path, flags, mode))
WRAP_OPEN(openat64, (int fd, const char *path, int flags, ...), below_at(fd, path), flags, (fd, path, flags, mode))
WRAP(int, creat, (const char *path, mode_t mode), below(path), (path, mode))

WRAP_WRITE(write, (int fd, const void *data, size_t n), fd, n, (fd, data, n), (fd, data, n / 2))
WRAP_WRITE(pwrite, (int fd, const void *data, size_t n, off_t at), fd, n, (fd, data, n, at), (fd, data, n / 2, at))
WRAP_WRITE(pwrite64, (int fd, const void *data, size_t n, off64_t at), fd, n, (fd, data, n, at), (fd, data, n / 2, at))
WRAP_WRITE(sendfile, (int out, int in, off_t *at, size_t n), out, n, (out, in, at, n), (out, in, at, n > 1000 ? 1000 : n / 2))
WRAP_WRITE(sendfile64, (int out, int in, off64_t *at, size_t n), out, n, (out, in, at, n), (out, in, at, n > 1000 ? 1000 : n / 2))
WRAP_WRITE(copy_file_range, (int in, off64_t *from, int out, off64_t *at, size_t n, unsigned flags), out, n,
           (in, from, out, at, n, flags), (in, from, out, at, n > 1000 ? 1000 : n / 2, flags))
WRAP(ssize_t, read, (int fd, void *data, size_t n), below_fd(fd), (fd, data, n))
WRAP(ssize_t, pread, (int fd, void *data, size_t n, off_t at), below_fd(fd), (fd, data, n, at))
WRAP(ssize_t, pread64, (int fd, void *data, size_t n, off64_t at), below_fd(fd), (fd, data, n, at))
WRAP(ssize_t, writev, (int fd, const struct iovec *parts, int n), below_fd(fd), (fd, parts, n))
WRAP(ssize_t, pwritev, (int fd, const struct iovec *parts, int n, off_t at), below_fd(fd), (fd, parts, n, at))

WRAP(int, fsync, (int fd), below_fd(fd), (fd))
WRAP(int, fdatasync, (int fd), below_fd(fd), (fd))
WRAP(int, ftruncate, (int fd, off_t size), below_fd(fd), (fd, size))
WRAP(int, ftruncate64, (int fd, off64_t size), below_fd(fd), (fd, size))
WRAP(int, truncate, (const char *path, off_t size), below(path), (path, size))
WRAP(int, flock, (int fd, int operation), below_fd(fd), (fd, operation))
WRAP(off64_t, lseek64, (int fd, off64_t at, int from), below_fd(fd), (fd, at, from))
WRAP(off_t, lseek, (int fd, off_t at, int from), below_fd(fd), (fd, at, from))

/* A close that fails has closed the file all the same, as on Linux. */
int close(int fd) {
    int fail = armed && fails("close", below_fd(fd), -1);
    NEXT(close);
    int result = next(fd);
    if (fail) { errno = error_number; return -1; }
    return result;
}

WRAP(int, rename, (const char *from, const char *to), below(from), (from, to))
WRAP(int, renameat, (int a, const char *from, int b, const char *to), below_at(a, from), (a, from, b, to))
WRAP(int, renameat2, (int a, const char *from, int b, const char *to, unsigned flags), below_at(a, from), (a, from, b, to, flags))
WRAP(int, link, (const char *from, const char *to), below(from), (from, to))
WRAP(int, linkat, (int a, const char *from, int b, const char *to, int flags), below_at(a, from), (a, from, b, to, flags))
WRAP(int, symlink, (const char *text, const char *path), below(path), (text, path))
WRAP(int, unlink, (const char *path), below(path), (path))
WRAP(int, unlinkat, (int fd, const char *path, int flags), below_at(fd, path), (fd, path, flags))
WRAP(int, rmdir, (const char *path), below(path), (path))
WRAP(int, mkdir, (const char *path, mode_t mode), below(path), (path, mode))
WRAP(int, mkdirat, (int fd, const char *path, mode_t mode), below_at(fd, path), (fd, path, mode))
WRAP(int, chmod, (const char *path, mode_t mode), below(path), (path, mode))
WRAP(int, fchmod, (int fd, mode_t mode), below_fd(fd), (fd, mode))
WRAP(int, fchmodat, (int fd, const char *path, mode_t mode, int flags), below_at(fd, path), (fd, path, mode, flags))
WRAP(int, utimensat, (int fd, const char *path, const struct timespec t[2], int flags), below_at(fd, path), (fd, path, t, flags))
WRAP(int, futimens, (int fd, const struct timespec t[2]), below_fd(fd), (fd, t))

WRAP(int, stat, (const char *path, struct stat *out), below(path), (path, out))
WRAP(int, lstat, (const char *path, struct stat *out), below(path), (path, out))
WRAP(int, fstat, (int fd, struct stat *out), below_fd(fd), (fd, out))
WRAP(int, fstatat, (int fd, const char *path, struct stat *out, int flags), below_at(fd, path), (fd, path, out, flags))
WRAP(int, stat64, (const char *path, struct stat64 *out), below(path), (path, out))
WRAP(int, lstat64, (const char *path, struct stat64 *out), below(path), (path, out))
WRAP(int, fstat64, (int fd, struct stat64 *out), below_fd(fd), (fd, out))
WRAP(int, fstatat64, (int fd, const char *path, struct stat64 *out, int flags), below_at(fd, path), (fd, path, out, flags))
WRAP(int, statvfs, (const char *path, struct statvfs *out), below(path), (path, out))
WRAP(int, statvfs64, (const char *path, struct statvfs64 *out), below(path), (path, out))
WRAP(int, access, (const char *path, int mode), below(path), (path, mode))
WRAP(int, faccessat, (int fd, const char *path, int mode, int flags), below_at(fd, path), (fd, path, mode, flags))
WRAP(ssize_t, readlink, (const char *path, char *out, size_t n), below(path), (path, out, n))
WRAP(ssize_t, readlinkat, (int fd, const char *path, char *out, size_t n), below_at(fd, path), (fd, path, out, n))

DIR *opendir(const char *path) {
    if (armed && fails("opendir", below(path), -1)) { errno = error_number; return NULL; }
    NEXT(opendir);
    return next(path);
}
