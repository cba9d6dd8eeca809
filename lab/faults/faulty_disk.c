// A disk that fails or freezes, below LMDB and the slot file.
//
// LD_PRELOAD it, set FAULTY_PATH to a prefix of the paths of the files, and write the fault into the file that
// FAULTY_CONTROL names:
//
//     read EIO      reads fail
//     write ENOSPC  writes fail, and syncs and allocations
//     freeze        nothing returns until the control file says something else
//
// An empty or missing control file: all is well. msync has no descriptor: it is always meant.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static int ours(int fd) {
    char link[64], path[4096];
    const char *prefix = getenv("FAULTY_PATH");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return prefix && length > 0 && !strncmp(path, prefix, strlen(prefix));
}

static int fault(const char *kind) {  // the errno that the operation fails with, or 0
    for (;;) {
        char text[64] = "", what[32] = "", error[32] = "";
        const char *name = getenv("FAULTY_CONTROL");
        FILE *control = name ? fopen(name, "re") : NULL;
        if (control) {
            if (!fgets(text, sizeof text, control)) text[0] = 0;
            fclose(control);
        }
        if (!strncmp(text, "freeze", 6)) {
            usleep(20000);
            continue;
        }
        if (sscanf(text, "%31s %31s", what, error) != 2 || strcmp(what, kind)) return 0;
        return !strcmp(error, "ENOSPC") ? ENOSPC : EIO;
    }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(kind, fd)                          \
    do {                                        \
        int error = ours(fd) ? fault(kind) : 0; \
        if (error) { errno = error; return -1; } \
    } while (0)

ssize_t pwrite(int fd, const void *from, size_t n, off_t at) { FAIL("write", fd); return REAL(pwrite)(fd, from, n, at); }
ssize_t pwrite64(int fd, const void *from, size_t n, off_t at) { FAIL("write", fd); return REAL(pwrite64)(fd, from, n, at); }
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) { FAIL("read", fd); return REAL(preadv)(fd, v, n, at); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off_t at) { FAIL("read", fd); return REAL(preadv64)(fd, v, n, at); }
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off_t at, int f) { FAIL("read", fd); return REAL(preadv64v2)(fd, v, n, at, f); }
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at, int f) { FAIL("read", fd); return REAL(preadv2)(fd, v, n, at, f); }
int fdatasync(int fd) { FAIL("write", fd); return REAL(fdatasync)(fd); }
int fsync(int fd) { FAIL("write", fd); return REAL(fsync)(fd); }

int posix_fallocate(int fd, off_t at, off_t n) {
    int error = ours(fd) ? fault("write") : 0;
    return error ? error : REAL(posix_fallocate)(fd, at, n);
}
int posix_fallocate64(int fd, off_t at, off_t n) {
    int error = ours(fd) ? fault("write") : 0;
    return error ? error : REAL(posix_fallocate64)(fd, at, n);
}

int msync(void *start, size_t n, int flags) {
    int error = fault("write");
    if (error) { errno = error; return -1; }
    return REAL(msync)(start, n, flags);
}
