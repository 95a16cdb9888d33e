/* A fixed job: computes, then sleeps to moments a fixed time apart, and prints how long and how late.
 *
 *     timed_job ITERATIONS WAKE_UPS INTERVAL_US [each-line]
 *
 * It prints one line of JSON: "runUs", the time of the computation, and "lateUs", the delay of each wake-up.
 * As in cyclictest, a moment that passes during a delay is left out. With `each-line` it does all this for every line
 * of its input, and answers an empty line with "timed_job is ready": the first process of a guest has the serial
 * console there. Without arguments it only waits.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static volatile uint64_t result; /* keeps the computation */

static int64_t compute_us(long iterations)
{
    uint64_t value = 88172645463325252ULL;
    int64_t began = now_ns();
    for (long number = 0; number < iterations; number++) {
        value ^= value << 13;
        value ^= value >> 7;
        value ^= value << 17;
    }
    result = value;
    return (now_ns() - began) / 1000;
}

static void wake_up(int32_t *late_us, long wake_ups, int64_t interval_ns)
{
    int64_t due = now_ns() + interval_ns;
    for (long number = 0; number < wake_ups; number++) {
        struct timespec moment = {due / 1000000000, due % 1000000000};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, NULL);
        int64_t woken = now_ns();
        late_us[number] = (int32_t)((woken - due) / 1000);
        do
            due += interval_ns;
        while (due <= woken);
    }
}

static void measure(long iterations, long wake_ups, int64_t interval_ns, int32_t *late_us)
{
    int64_t run_us = compute_us(iterations);
    wake_up(late_us, wake_ups, interval_ns);
    printf("{\"runUs\": %lld, \"lateUs\": [", (long long)run_us);
    for (long number = 0; number < wake_ups; number++)
        printf(number ? ",%d" : "%d", late_us[number]);
    printf("]}\n");
    fflush(stdout);
}

int main(int count, char **words)
{
    char line[80];
    if (count == 1)
        return pause();
    if (count < 4)
        return 2;
    long iterations = atol(words[1]), wake_ups = atol(words[2]);
    int64_t interval_ns = atol(words[3]) * INT64_C(1000);
    int32_t *late_us = malloc((size_t)wake_ups * sizeof(int32_t));
    if (late_us == NULL)
        return 1;
    memset(late_us, 1, (size_t)wake_ups * sizeof(int32_t));
    mlockall(MCL_CURRENT | MCL_FUTURE);
    prctl(PR_SET_TIMERSLACK, 1UL);
    if (count == 4) {
        measure(iterations, wake_ups, interval_ns, late_us);
        return 0;
    }
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (line[0] != '\n') {
            measure(iterations, wake_ups, interval_ns, late_us);
            continue;
        }
        printf("timed_job is ready\n");
        fflush(stdout);
    }
    return 0;
}
