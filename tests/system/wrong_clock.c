/* Preloaded into a node, this moves the time of day that the process sees by the seconds in the file $WRONG_CLOCK: 8 bytes,
   native order. Other clocks are as they are. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset_s;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("WRONG_CLOCK");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *found = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED)
        offset_s = found;
    if (fd >= 0)
        close(fd);
}

int clock_gettime(clockid_t id, struct timespec *found) {
    int result = syscall(SYS_clock_gettime, id, found);
    if (result == 0 && offset_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        found->tv_sec += *offset_s;
    return result;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0)
        return -1;
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found)
        *found = now.tv_sec;
    return now.tv_sec;
}
