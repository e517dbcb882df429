/* The base of every test program: checks that count, ranks as processes or threads, the exchange of ids, seeded values, device
 * memory, and a digest of all results.
 *
 * A program's standard output is deterministic: the same with and without Windlass. Everything else (failures, seeds) goes to
 * standard error. Each NCCL call made through NCCL() or CODE() is counted by name over all ranks. The counts go to the file that
 * CTESTS_CALLS names, and the runner compares them with Windlass's report. */
#ifndef WINDLASS_CTESTS_HARNESS_H
#define WINDLASS_CTESTS_HARNESS_H

#include <nccl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "cuda_driver.h"

enum { RANKS_MAX = 18, SLOTS_MAX = 64 };

/* Exit statuses that CTest and the runner know. */
enum { STATUS_PASSED = 0, STATUS_FAILED = 1, STATUS_SKIPPED = 77 };

enum rank_kind { PROCESSES, THREADS };

struct rank {
  int rank, ranks;
  enum rank_kind kind;
  CUdevice device;
  CUcontext context;
  CUstream stream;
  uint64_t digest; /* of all results that this rank has recorded */
  void* argument;  /* the argument of run_ranks */
};

/* Starts the program and its time limit. */
void begin(const char* name, int seconds);
/* Prints the totals and returns the program's exit status. */
int finish(void);
/* Ends the program as skipped; `reason` is printed. */
void skip(const char* reason);

/* The number of ranks to run: CTESTS_RANKS, else `usual`, but no more than there are devices. Skips the program if there are
 * fewer than two. */
int rank_count(int usual);
/* Whether this runs on GPUs (CTESTS_MACHINE). On simulators messages are smaller. */
bool on_gpus(void);
/* Whether to run a part of the program: the arguments name parts, none means all. */
bool is_wanted(int count, char** arguments, const char* part);
/* Reads the arguments of a program whose sections have parts. They name sections (`processes` and `threads`, with the same
 * parts; `in_turn`, `one_thread`, `faults`) and parts. None means all but `faults`, which runs only if named. Parts alone run in
 * both sections that have parts. */
void choose(int count, char** arguments);
bool is_section_chosen(const char* section);
/* Runs a part of a section if it is wanted. Rank 0 prints a line at its end, and when time is up the harness says which rank
 * is in which part. The first argument of the part's function is `self`. */
#define RUN_PART(function, ...) if (part_begins(self, #function)) function(__VA_ARGS__), part_ends(self)
bool part_begins(struct rank* self, const char* part);
void part_ends(struct rank* self);
/* Names the section that runs now, for the message when time is up. run_ranks calls it itself. */
void section_begins(const char* section);
/* Runs `body` once for each rank, with a device, its primary context and a stream; prints one digest line a rank. */
void run_ranks(const char* section, enum rank_kind kind, int ranks, void (*body)(struct rank*), void* argument);
/* Waits until every rank of the running section is here. */
void meet(struct rank* self);
/* Waits until that thread of this process has slept for 300 ms without a break. A thread that must wait for others does so by
 * then, however loaded the machine is. */
void await_sleep(pid_t thread);
/* Waits as `meet` does, but only on GPUs and where ranks are threads. Call it between launches and whatever allocates, frees,
 * makes or ends communicators: with peer access between devices these may wait for all kernels of the process, and delay the
 * other threads' launches, for which those kernels wait. NCCL's guide says so under "Concurrency between NCCL and CUDA calls",
 * and NCCL 2.28.9 alone hung so on H200s. Elsewhere ranks run ahead freely. */
void together(struct rank* self);
/* Ends communicators, in this order. On GPUs in one group: NCCL's destroy of a used communicator waits until its peers in other
 * processes end the same one (it joins the proxy thread, which their connections keep). So two ranks with two orders would wait
 * for each other for ever. */
void destroy_each(ncclComm_t* communicators, int count);
/* An id made by rank `maker` and given to all ranks. Every rank calls with the same `slot`, a place of the exchange. */
ncclUniqueId share_id(struct rank* self, int slot, int maker);
/* The same, made past Windlass, as by a process without it. */
ncclUniqueId share_foreign_id(struct rank* self, int slot, int maker);
/* A communicator of all ranks of the section. With CTESTS_BLOCKING=0 its calls do not wait (blocking = 0). */
ncclComm_t world(struct rank* self, int slot);
/* Takes the answer of a call, ncclSuccess or ncclInProgress, and waits until the communicator is no longer in progress. Gives its state. */
ncclResult_t settled(ncclComm_t communicator, ncclResult_t answer);

/* Checks. The first three count a failure and go on; NCCL() and CUDA() end the rank. */
#define CHECK(condition) check_that((condition), #condition, __FILE__, __LINE__)
#define EQUAL(left, right) check_equal((long long)(left), (long long)(right), #left " == " #right, __FILE__, __LINE__)
#define CODE(call, code) check_code((call), (code), #call, __FILE__, __LINE__)
#define NCCL(call) require_nccl((call), #call, __FILE__, __LINE__)
#define CUDA(call) require_cuda((call), #call, __FILE__, __LINE__)
bool check_that(bool holds, const char* text, const char* file, int line);
bool check_equal(long long left, long long right, const char* text, const char* file, int line);
bool check_code(ncclResult_t seen, ncclResult_t wanted, const char* call, const char* file, int line);
void require_nccl(ncclResult_t seen, const char* call, const char* file, int line);
void require_cuda(CUresult seen, const char* call, const char* file, int line);
/* Counts `calls` calls of a function made without the macros above; a negative number takes calls off. */
void count_calls(const char* function, int calls);

/* Random numbers: the same everywhere from the same seed. CTESTS_SEED replaces the program's own seed. */
struct random { uint64_t state; };
uint64_t program_seed(uint64_t otherwise);
struct random random_from(uint64_t seed);
uint64_t random_next(struct random* random);
/* A number from 0 to `below` - 1. */
uint64_t random_below(struct random* random, uint64_t below);

/* Adds bytes to a rank's digest. */
void record(struct rank* self, const void* bytes, size_t count);
uint64_t digest_of(uint64_t digest, const void* bytes, size_t count);

/* Device memory of the calling thread's context. Zero bytes give a pointer, too. */
void* device_alloc(size_t bytes);
void device_free(void* pointer);
void device_fill(void* pointer, unsigned char value, size_t bytes);
void upload(void* device, const void* host, size_t bytes);
void download(void* host, const void* device, size_t bytes);
CUstream new_stream(void);
void wait_for(CUstream stream);
/* NCCL's stream type is the driver's. */
static inline cudaStream_t as_cuda(CUstream stream) { return (cudaStream_t)stream; }

/* For programs that make their ranks themselves. */
CUcontext use_device(int device);
int device_count(void);

#endif
