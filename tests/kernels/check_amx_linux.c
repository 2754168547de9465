/* What Linux asks of a program that uses AMX's tiles, checked where there are tiles: amx_machine.py runs this in an
 * emulated machine, and it may be run on a real one.
 *
 *     cc -O2 -std=gnu11 -ffp-contract=off -pthread -I bitnet_ref/kernels/cpu tests/kernels/check_amx_linux.c -lm && ./a.out
 *
 * In turn: tiles without permission end a process; a signal stack too small for them has it refused, and the reason is
 * given; a child inherits it; threads, signals and processes that share a processor keep their own tiles.
 * Exit code 1 on the first difference, 0 with "not run" where the processor has none. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "kernels.h"

enum { N_SHAPES = 6, THREADS = 4, K = 1104, MOST_TOKENS = 47 };

static const kernel_set *amx;
static size_t amx_index;

static void must(int ok, const char *what) {
    if (ok) return;
    printf("FAILED: %s\n", what);
    exit(1);
}

/* One product of a shape of its own, and what the portable kernel makes of it */
typedef struct {
    size_t M, rows, blocks;
    uint8_t *panel;
    int8_t *x;
    int32_t *x_sum, *expected;
} problem;

static problem problems[N_SHAPES];

static void *allocate(size_t size) {
    void *memory = NULL;
    must(posix_memalign(&memory, 64, size) == 0, "memory");
    return memory;
}

static void make_problems(void) {
    static const size_t tokens[N_SHAPES] = {7, 16, 17, 32, 33, MOST_TOKENS}, blocks[N_SHAPES] = {5, 64, 69, 4, 67, 6};
    uint64_t state = 20240227;
    void *scratch = allocate(SCRATCH_BYTES);
    for (size_t i = 0; i < N_SHAPES; i++) {
        problem *p = &problems[i];
        p->M = tokens[i], p->blocks = blocks[i], p->rows = i % 2 ? PANEL_ROWS : 37;
        const size_t wide = p->blocks * BLOCK_K, row_bytes = wide / 4;
        uint8_t *packed = allocate(p->rows * row_bytes);
        p->panel = allocate(p->blocks * BLOCK_BYTES), p->x = allocate(p->M * wide);
        p->x_sum = allocate(p->M * sizeof(int32_t)), p->expected = allocate(p->M * p->rows * sizeof(int32_t));
        for (size_t k = 0; k < p->rows * row_bytes; k++) {
            packed[k] = 0;
            for (int f = 0; f < 4; f++) {
                state = state * 6364136223846793005ULL + 1442695040888963407ULL;
                packed[k] |= (uint8_t)((state >> 33) % 3 << 2 * f);
            }
        }
        for (size_t m = 0; m < p->M; m++) {
            p->x_sum[m] = 0;
            for (size_t k = 0; k < wide; k++) {
                state = state * 6364136223846793005ULL + 1442695040888963407ULL;
                p->x_sum[m] += p->x[m * wide + k] = (int8_t)(state >> 40);
            }
        }
        pack_panel(packed, p->rows, row_bytes, p->panel);
        ternary_panel_scalar(p->panel, p->blocks, p->x, wide, p->M, p->x_sum, p->expected, p->rows, p->rows, scratch);
        free(packed);
    }
    free(scratch);
}

/* The caller's buffers: a signal handler may not allocate */
typedef struct {
    _Alignas(64) uint8_t scratch[SCRATCH_BYTES];
    int32_t acc[MOST_TOKENS * PANEL_ROWS];
} space;

static int right(const problem *p, space *s) {
    amx->ternary[MULTIPLY_ADD].run(p->panel, p->blocks, p->x, p->blocks * BLOCK_K, p->M, p->x_sum, s->acc, p->rows,
                                   p->rows, s->scratch);
    return !memcmp(s->acc, p->expected, p->M * p->rows * sizeof *s->acc);
}

static space *new_space(void) { return allocate(sizeof(space)); }

/* The status of a child that does `work` */
static int in_a_child(void (*work)(void)) {
    fflush(stdout);
    const pid_t child = fork();
    must(child >= 0, "fork");
    if (child == 0) {
        work();
        _exit(0);
    }
    int status = -1;
    must(waitpid(child, &status, 0) == child, "waitpid");
    return status;
}

static int exited_well(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }

static void without_permission(void) { right(&problems[0], new_space()); }

static void with_a_small_signal_stack(void) {
    /* As large as the kernel asked for before there were tiles, less than their 8 KB */
    stack_t small = {.ss_size = 6144};
    small.ss_sp = allocate(small.ss_size);
    if (sigaltstack(&small, NULL) != 0) _exit(errno == ENOMEM ? 3 : 4);
    const char *lacks = kernel_set_lacks(amx_index);
    if (lacks == NULL || !strstr(lacks, "signal stack")) _exit(5);
    const stack_t none = {.ss_flags = SS_DISABLE};
    if (sigaltstack(&none, NULL) != 0 || kernel_set_lacks(amx_index) != NULL) _exit(6); /* it may be asked for again */
    _exit(right(&problems[1], new_space()) ? 0 : 7);
}

static void by_inheritance(void) {
    space *s = new_space();
    for (size_t i = 0; i < N_SHAPES; i++)
        if (!right(&problems[i], s)) _exit(1);
}

static int rounds = 1000;
static _Thread_local space *in_handler;
static volatile sig_atomic_t signals, wrong_in_signal;

static void on_timer(int number) {
    (void)number;
    wrong_in_signal |= !right(&problems[signals++ % N_SHAPES], in_handler);
}

static void *work_through(void *first) {
    space *s = new_space();
    size_t wrong = 0;
    sigset_t timer;
    in_handler = new_space();
    must(!sigemptyset(&timer) && !sigaddset(&timer, SIGALRM), "a set of signals");
    must(!pthread_sigmask(SIG_UNBLOCK, &timer, NULL), "the signal mask");
    for (int round = 0; round < rounds; round++) {
        wrong += !right(&problems[((size_t)first + round) % N_SHAPES], s);
        if ((size_t)first % 2) usleep(20); /* and takes the processor from another as it wakes */
    }
    must(!pthread_sigmask(SIG_BLOCK, &timer, NULL), "the signal mask");
    free(s), free(in_handler);
    return (void *)wrong;
}

static size_t wrong_over_threads(void) {
    pthread_t threads[THREADS];
    size_t wrong = 0;
    for (size_t i = 0; i < THREADS; i++) must(!pthread_create(&threads[i], NULL, work_through, (void *)i), "thread");
    for (size_t i = 0; i < THREADS; i++) {
        void *found;
        must(!pthread_join(threads[i], &found), "join");
        wrong += (size_t)found;
    }
    return wrong;
}

static void threads_in_a_child(void) { _exit(wrong_over_threads() ? 1 : 0); }

int main(int argc, char **argv) {
    if (argc > 1) rounds = atoi(argv[1]);
    while (amx_index < N_KERNEL_SETS && strcmp(KERNEL_SETS[amx_index]->name, "amx")) amx_index++;
    must(amx_index < N_KERNEL_SETS, "this build has no AMX kernels");
    amx = KERNEL_SETS[amx_index];
    make_problems();
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1 << 24)) {
        printf("not run: %s\n", kernel_set_lacks(amx_index));
        return 0;
    }
    printf("smallest signal stack: %lu bytes\n", getauxval(AT_MINSIGSTKSZ));

    const int refused = in_a_child(without_permission);
    must(WIFSIGNALED(refused) && WTERMSIG(refused) == SIGILL, "tiles without permission must end in SIGILL");
    const int small = in_a_child(with_a_small_signal_stack);
    printf("a small signal stack: exit code %d\n", WEXITSTATUS(small));
    must(exited_well(small), "a small signal stack");

    const char *lacks = kernel_set_lacks(amx_index);
    if (lacks) printf("%s\n", lacks);
    must(lacks == NULL, "permission");
    must(kernel_set_lacks(amx_index) == NULL, "permission, asked for twice");
    space *s = new_space();
    for (size_t i = 0; i < N_SHAPES; i++) must(right(&problems[i], s), "a product");
    must(exited_well(in_a_child(by_inheritance)), "a child inherits the permission");

    must(wrong_over_threads() == 0, "threads");
    must(exited_well(in_a_child(threads_in_a_child)), "threads of a child");
    sigset_t timer; /* for the threads alone, since this one only waits */
    must(!sigemptyset(&timer) && !sigaddset(&timer, SIGALRM), "a set of signals");
    must(!pthread_sigmask(SIG_BLOCK, &timer, NULL), "the signal mask");
    struct sigaction action = {.sa_handler = on_timer};
    const struct itimerval every = {{0, 100}, {0, 100}}, never = {{0, 0}, {0, 0}};
    must(!sigaction(SIGALRM, &action, NULL) && !setitimer(ITIMER_REAL, &every, NULL), "timer");
    const size_t wrong = wrong_over_threads();
    must(!setitimer(ITIMER_REAL, &never, NULL), "timer");
    printf("%d signals came between\n", (int)signals);
    must(!wrong, "products that signals interrupt");
    must(!wrong_in_signal, "products within signal handlers");
    must(signals > 0, "no signal came");
    puts("permission, children, threads and signals: all equal");
    return 0;
}
