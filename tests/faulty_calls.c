/* Preloaded into a process: system calls on files fail with a chosen error, in or below one folder.

FAULTY_CALLS  such as `fsync=5,flock=95`: name of a call -> errno; `flock=0` succeeds and locks nothing.
              fsync_folder, rename_folder: the call on a folder; fsync, rename: on a file. write: writes of 2 bytes up. append: the
              opening of a file for appending.
FAULTY_PATH   text that the path of the file holds; other files are spared.

Both are read at each call, so that a forked child can be given its own.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

/* Return the error that a call on a path is to fail with; 0 for success without a call; -1 to make the call. */
static int fault(const char *call, const char *path) {
    const char *calls = getenv("FAULTY_CALLS"), *part = getenv("FAULTY_PATH");
    if (calls == NULL || part == NULL || path == NULL || strstr(path, part) == NULL) return -1;
    size_t length = strlen(call);
    for (const char *at = calls; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, call, length) == 0 && at[length] == '=') return atoi(at + length + 1);
    }
    return -1;
}

/* Write the path of a descriptor, or of a name relative to a folder's descriptor, into `path`. */
static const char *path_of(int descriptor, const char *name, char *path) {
    char link[64];
    if (name != NULL && (name[0] == '/' || descriptor < 0)) return name;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return NULL;
    path[length] = 0;
    if (name != NULL && length + strlen(name) + 2 < PATH_MAX) {
        strcat(path, "/");
        strcat(path, name);
    }
    return path;
}

static int is_folder(const char *path) {
    struct stat found;
    return path != NULL && stat(path, &found) == 0 && S_ISDIR(found.st_mode);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_IF(call, where)                                                                                   \
    do {                                                                                                       \
        int number = fault(call, where);                                                                       \
        if (number == 0) return 0;                                                                             \
        if (number > 0) {                                                                                      \
            errno = number;                                                                                    \
            return -1;                                                                                         \
        }                                                                                                      \
    } while (0)

int fsync(int descriptor) {
    char path[PATH_MAX];
    const char *where = path_of(descriptor, NULL, path);
    FAIL_IF(is_folder(where) ? "fsync_folder" : "fsync", where);
    return REAL(fsync)(descriptor);
}

int flock(int descriptor, int operation) {
    char path[PATH_MAX];
    FAIL_IF("flock", path_of(descriptor, NULL, path));
    return REAL(flock)(descriptor, operation);
}

int chmod(const char *name, mode_t mode) {
    FAIL_IF("chmod", name);
    return REAL(chmod)(name, mode);
}

int fchmod(int descriptor, mode_t mode) {
    char path[PATH_MAX];
    FAIL_IF("chmod", path_of(descriptor, NULL, path));
    return REAL(fchmod)(descriptor, mode);
}

int fchmodat(int folder, const char *name, mode_t mode, int flags) {
    char path[PATH_MAX];
    FAIL_IF("chmod", path_of(folder, name, path));
    return REAL(fchmodat)(folder, name, mode, flags);
}

int rename(const char *source, const char *target) {
    FAIL_IF(is_folder(source) ? "rename_folder" : "rename", target);
    return REAL(rename)(source, target);
}

int renameat(int from, const char *source, int to, const char *target) {
    char path[PATH_MAX];
    FAIL_IF(is_folder(source) ? "rename_folder" : "rename", path_of(to, target, path));
    return REAL(renameat)(from, source, to, target);
}

int unlink(const char *name) {
    FAIL_IF("unlink", name);
    return REAL(unlink)(name);
}

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    FAIL_IF("unlink", path_of(folder, name, path));
    return REAL(unlinkat)(folder, name, flags);
}

int mkdir(const char *name, mode_t mode) {
    FAIL_IF("mkdir", name);
    return REAL(mkdir)(name, mode);
}

ssize_t write(int descriptor, const void *content, size_t count) {
    char path[PATH_MAX];
    if (count > 1) FAIL_IF("write", path_of(descriptor, NULL, path));
    return REAL(write)(descriptor, content, count);
}

int ftruncate64(int descriptor, off64_t size) {
    char path[PATH_MAX];
    FAIL_IF("ftruncate", path_of(descriptor, NULL, path));
    return REAL(ftruncate64)(descriptor, size);
}

#define OPEN(name)                                                                                             \
    int name(const char *file, int flags, ...) {                                                               \
        va_list rest;                                                                                          \
        va_start(rest, flags);                                                                                 \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                \
        va_end(rest);                                                                                          \
        if (flags & O_APPEND) FAIL_IF("append", file);                                                         \
        return REAL(name)(file, flags, mode);                                                                  \
    }
OPEN(open)
OPEN(open64)
