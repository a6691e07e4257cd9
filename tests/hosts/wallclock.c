/* Preloaded into a process, shifts its wall clock by the nanoseconds that a file holds.

   The monotonic clock stays, and so do waits until a moment of either clock: what was asked for by the
   shifted clock is told to the kernel by the real one. A wait that began before a step is not touched. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define WALL_S 1000000000LL /* no monotonic clock is this late */

static int64_t nothing = 0;
static volatile int64_t *shift_ns = &nothing;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_cond_wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_sem_wait)(sem_t *, const struct timespec *);
static long (*real_syscall)(long, ...);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("NOISE_CLOCK");
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_cond_wait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    real_sem_wait = dlsym(RTLD_NEXT, "sem_timedwait");
    real_syscall = dlsym(RTLD_NEXT, "syscall");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *at = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        if (at != MAP_FAILED) shift_ns = at;
        close(file);
    }
}

static struct timespec shifted(struct timespec time, int64_t by_ns) {
    int64_t all = time.tv_sec * SECOND + time.tv_nsec + by_ns;
    struct timespec moved = {.tv_sec = all / SECOND, .tv_nsec = all % SECOND};
    return moved;
}

static struct timespec unshifted(const struct timespec *time) {
    return shifted(*time, time->tv_sec > WALL_S ? -*shift_ns : 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_gettime) return (int)syscall(SYS_clock_gettime, clock, now);
    int code = real_gettime(clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *now = shifted(*now, *shift_ns);
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec time;
    int code = clock_gettime(CLOCK_REALTIME, &time);
    if (code == 0 && now) {
        now->tv_sec = time.tv_sec;
        now->tv_usec = time.tv_nsec / 1000;
    }
    return code;
}

time_t time(time_t *into) {
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    struct timespec real = unshifted(until);
    return real_cond_wait(cond, mutex, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec real = unshifted(until);
    return real_sem_wait(semaphore, &real);
}

long syscall(long number, ...) {
    long a[6];
    va_list more;
    va_start(more, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(more, long);
    va_end(more);
    if (!real_syscall) real_syscall = dlsym(RTLD_NEXT, "syscall");
    struct timespec real;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3] &&
        (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET) {
        real = unshifted((const struct timespec *)a[3]);
        a[3] = (long)&real;
    }
    return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
