/* Holds that over the p2p transport and native collectives a rank's death in the middle of a message ends its partner's receive
 * with an asynchronous error after WINDLASS_HANG_TIMEOUT. The stream is then free, calls on that communicator return the error,
 * an abort returns at once, and another communicator goes on meanwhile. An abort from another thread ends a receive without a
 * sender. What a rank sent before it ended arrives, also behind work of the application that takes longer than that timeout. A
 * rank that fails by itself, here by an invalid stream, ends its partners' waits as a dead one does, and so does one that executes
 * another program. NCCL alone would wait. */
#include "../support/collective.h"
#include "../support/messages.h"
#include "../support/tuning.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 12 << 20 }; /* several times what a ring holds */

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void pair_works(struct rank* self, ncclComm_t pair, uint64_t key) {
  int own = self->rank == 2;
  struct parcel both[] = {{0, 1, 5000, 0, 3, ncclUint8, key}, {1, 0, 70001, 1, 0, ncclUint8, key + 1}};
  exchange_whole(&(struct rank){.rank = own, .ranks = 2, .stream = self->stream, .device = self->device}, pair, both, 2);
}

/* A pipe on which rank 0 lets the program go that rank 1 executes. */
static int executing[2];

/* Rank 1 dies while it sends to rank 0, or executes another program, with an argument; ranks 0 and 2 have a communicator of their own. */
static void partner_dies(struct rank* self) {
  ncclComm_t all = world(self, 0), pair = NULL;
  ncclUniqueId id = share_id(self, 1, 0);
  CUstream stream = new_stream();
  struct message half = message_to_send(5, BYTES / 4, 0), whole = message_to_receive(6, BYTES, 0);
  struct message first = message_to_receive(5, BYTES / 4, 0);
  if (self->rank == 1) {
    /* The first message that rank 0 waits for. */
    message_send(&half, 0, all, stream);
    wait_for(stream);
    count_calls("ncclSend", -1);
    count_calls("ncclCommInitRank", -1);
    usleep(200000);
    if (self->argument) {
      dup2(executing[0], STDIN_FILENO);
      dup2(STDERR_FILENO, STDOUT_FILENO);
      execlp("head", "head", "-c1", NULL);
    }
    _exit(self->argument != NULL);
  }
  NCCL(ncclCommInitRank(&pair, 2, id, self->rank == 2));
  pair_works(self, pair, 20);
  if (self->rank == 0) {
    ncclResult_t error = ncclSuccess;
    double began = seconds();
    NCCL(ncclGroupStart());
    message_receive(&first, 1, all, stream);
    message_receive(&whole, 1, all, stream);
    NCCL(ncclGroupEnd());
    while (error == ncclSuccess && seconds() - began < 60) {
      NCCL(ncclCommGetAsyncError(all, &error));
      usleep(10000);
    }
    EQUAL(error, ncclRemoteError);
    double took = seconds() - began;
    CHECK(took > 1.5);
    wait_for(stream); /* the kernel has left */
    message_verify(&first, self);
    CODE(ncclSend(whole.at, 8, ncclUint8, 2, all, as_cuda(stream)), ncclRemoteError);
    began = seconds();
    NCCL(ncclCommAbort(all));
    CHECK(seconds() - began < 10);
    if (self->argument) EQUAL(write(executing[1], "\n", 1), 1);
  }
  pair_works(self, pair, 30);
  if (self->rank == 2) NCCL(ncclCommAbort(all));
  NCCL(ncclCommDestroy(pair));
  message_release(&half);
  message_release(&first);
  message_release(&whole);
  CUDA(cuStreamDestroy_v2(stream));
}

static ncclResult_t error_after_a_while(ncclComm_t communicator) {
  ncclResult_t error = ncclSuccess;
  double began = seconds();
  while (error == ncclSuccess && seconds() - began < 30) {
    NCCL(ncclCommGetAsyncError(communicator, &error));
    usleep(10000);
  }
  return error;
}

static void sleep_long(void* unused) {
  (void)unused;
  sleep(7);
}

/* Rank 1 sends and ends in order while work of rank 0 holds rank 0's stream for longer than WINDLASS_HANG_TIMEOUT: all messages
 * arrive. A later wait for rank 1 ends with an error. */
static void partner_ends_before_it_is_heard(struct rank* self) {
  ncclComm_t all = world(self, 0);
  CUstream stream = new_stream();
  struct message small = self->rank ? message_to_send(80, 100, 0) : message_to_receive(80, 100, 0);
  struct message large = self->rank ? message_to_send(81, 1 << 20, 0) : message_to_receive(81, 1 << 20, 0);
  struct message never = message_to_receive(82, 100, 0);
  struct transfer told = {.which = BROADCAST, .type = ncclFloat, .count = 1000, .rank = self->rank, .ranks = self->ranks, .root = 1, .key = 83};
  transfer_prepare(&told);
  struct message* both[] = {&small, &large};
  if (self->rank == 1) {
    for (int i = 0; i < 2; i++) message_send(both[i], 0, all, stream);
    transfer_launch(&told, all, stream);
    wait_for(stream);
    NCCL(ncclCommDestroy(all));
    count_calls("ncclSend", -2);
    count_calls("ncclBroadcast", -1);
    count_calls("ncclCommDestroy", -1);
    count_calls("ncclCommInitRank", -1);
    _exit(0);
  }
  ncclResult_t error = ncclSuccess;
  CUDA(cuLaunchHostFunc(stream, sleep_long, NULL));
  for (int i = 0; i < 2; i++) message_receive(both[i], 1, all, stream);
  transfer_launch(&told, all, stream);
  wait_for(stream);
  NCCL(ncclCommGetAsyncError(all, &error));
  EQUAL(error, ncclSuccess);
  for (int i = 0; i < 2; i++) message_verify(both[i], self);
  transfer_verify(&told, self);
  double began = seconds();
  message_receive(&never, 1, all, stream);
  EQUAL(error_after_a_while(all), ncclRemoteError);
  CHECK(seconds() - began > 1.5);
  wait_for(stream);
  NCCL(ncclCommAbort(all));
  for (int i = 0; i < 2; i++) message_release(both[i]);
  message_release(&never);
  transfer_release(&told);
  CUDA(cuStreamDestroy_v2(stream));
}

static void* abort_soon(void* communicator) {
  usleep(300000);
  NCCL(ncclCommAbort((ncclComm_t)communicator));
  return NULL;
}

/* Another thread aborts a receive without a sender. */
static void aborted(struct rank* self) {
  ncclComm_t all = world(self, 0);
  struct message never = message_to_receive(7, 1000, 0);
  acquaint(self, all, self->rank);
  if (self->rank == 0) {
    pthread_t thread;
    message_receive(&never, 1, all, self->stream);
    if (pthread_create(&thread, NULL, abort_soon, all)) return;
    wait_for(self->stream);
    pthread_join(thread, NULL);
  } else {
    NCCL(ncclCommAbort(all));
  }
  message_release(&never);
}

/* Rank 0 cannot launch what rank 1 waits for; rank 2 waits for rank 1, which gives up. The first message arrived. */
static void a_launch_fails(struct rank* self) {
  ncclComm_t all = world(self, 0);
  struct message first = self->rank == 0 ? message_to_send(40, 70000, 0) : message_to_receive(40, 70000, 0);
  struct message never = message_to_receive(42, 100, 0);
  struct message second = self->rank == 0 ? message_to_send(41, 3000, 0) : message_to_receive(41, 3000, 0);
  if (self->rank == 0) {
    CUstream none = new_stream();
    message_send(&first, 1, all, self->stream);
    wait_for(self->stream);
    message_receive(&never, 2, all, self->stream);
    CUDA(cuStreamDestroy_v2(none));
    CODE(ncclSend(second.at, second.bytes, ncclUint8, 1, all, as_cuda(none)), ncclUnhandledCudaError);
    CODE(ncclSend(second.at, second.bytes, ncclUint8, 1, all, as_cuda(self->stream)), ncclUnhandledCudaError);
    EQUAL(error_after_a_while(all), ncclUnhandledCudaError);
    wait_for(self->stream); /* earlier work ends, too, once rank 2 has given up */
    meet(self);
    double began = seconds();
    NCCL(ncclCommDestroy(all));
    CHECK(seconds() - began < 10);
  } else {
    if (self->rank == 1) message_receive(&first, 0, all, self->stream);
    message_receive(&second, self->rank - 1, all, self->stream);
    EQUAL(error_after_a_while(all), ncclRemoteError);
    wait_for(self->stream);
    if (self->rank == 1) message_verify(&first, self);
    meet(self);
    NCCL(ncclCommAbort(all));
  }
  message_release(&first);
  message_release(&second);
  message_release(&never);
}

static void write_table(const struct rank* self) {
  FILE* file = tuning_begin(self);
  if (!file) return;
  tuning_row(file, self, "all_reduce", "native_bytes_max", "64M");
  tuning_row(file, self, "all_gather", "native_bytes_max", "64M");
  tuning_end(file);
}

enum { SMALL, LARGE, TOGETHER, IN_GRAPH, COURSES, CALLS_OF_COURSE = 4 };

/* One way to call collectives, with a communicator of its own. */
struct course { ncclComm_t communicator; CUstream stream; CUgraphExec executable; struct transfer list[CALLS_OF_COURSE]; int count; };

static void course_prepare(struct rank* self, struct course* course, int kind) {
  course->communicator = world(self, kind);
  course->stream = new_stream();
  course->count = kind == TOGETHER || kind == IN_GRAPH ? CALLS_OF_COURSE : 1;
  for (int i = 0; i < course->count; i++) {
    course->list[i] = (struct transfer){.which = i % 2 ? ALL_GATHER : ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .rank = self->rank,
                                        .count = kind == SMALL ? 100 : 30000, .ranks = self->ranks, .key = (uint64_t)(60 + 10 * kind + i)};
    transfer_prepare(&course->list[i]);
  }
}

static void course_run(struct course* course, int kind) {
  if (kind == IN_GRAPH && course->executable) {
    CUDA(cuGraphLaunch(course->executable, course->stream));
    return;
  }
  CUgraph graph = NULL;
  if (kind == IN_GRAPH) CUDA(cuStreamBeginCapture_v2(course->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  if (kind == TOGETHER) NCCL(ncclGroupStart());
  for (int i = 0; i < course->count; i++) transfer_launch(&course->list[i], course->communicator, course->stream);
  if (kind == TOGETHER) NCCL(ncclGroupEnd());
  if (kind != IN_GRAPH) return;
  CUDA(cuStreamEndCapture(course->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&course->executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
  CUDA(cuGraphLaunch(course->executable, course->stream));
}

/* All ranks run each course once. Then rank 1 dies and the others run all courses again: each ends with an error by itself. */
static void one_dies_before_collectives(struct rank* self) {
  struct course courses[COURSES] = {{0}};
  write_table(self);
  for (int kind = 0; kind < COURSES; kind++) course_prepare(self, &courses[kind], kind);
  for (int kind = 0; kind < COURSES; kind++) {
    course_run(&courses[kind], kind);
    wait_for(courses[kind].stream);
    for (int i = 0; i < courses[kind].count; i++) transfer_verify(&courses[kind].list[i], self);
  }
  if (self->rank == 1) {
    /* A rank that dies leaves no report, so its calls are not counted. */
    count_calls("ncclCommInitRank", -COURSES);
    count_calls("ncclGroupStart", -1);
    count_calls("ncclGroupEnd", -1);
    for (int kind = 0; kind < COURSES; kind++)
      for (int i = 0; i < courses[kind].count; i++) count_calls(i % 2 ? "ncclAllGather" : "ncclAllReduce", -1);
    _exit(0);
  }
  for (int kind = 0; kind < COURSES; kind++) course_run(&courses[kind], kind);
  for (int kind = 0; kind < COURSES; kind++) {
    EQUAL(error_after_a_while(courses[kind].communicator), ncclRemoteError);
    wait_for(courses[kind].stream);
  }
  for (int kind = 0; kind < COURSES; kind++) {
    double began = seconds();
    if (courses[kind].executable) CUDA(cuGraphExecDestroy(courses[kind].executable));
    NCCL(ncclCommAbort(courses[kind].communicator));
    CHECK(seconds() - began < 10);
    for (int i = 0; i < courses[kind].count; i++) transfer_release(&courses[kind].list[i]);
    CUDA(cuStreamDestroy_v2(courses[kind].stream));
  }
}

int main(void) {
  begin("faults", 120);
  if (rank_count(4) < 3) skip("needs three ranks");
  run_ranks("aborted", PROCESSES, 2, aborted, NULL);
  /* On GPUs a program may not pass an invalid stream. */
  if (!on_gpus()) run_ranks("launch fails", PROCESSES, 3, a_launch_fails, NULL);
  run_ranks("partner dies", PROCESSES, 3, partner_dies, NULL);
  if (pipe(executing)) return STATUS_FAILED;
  run_ranks("partner executes", PROCESSES, 3, partner_dies, executing);
  run_ranks("partner ends before it is heard", PROCESSES, 2, partner_ends_before_it_is_heard, NULL);
  run_ranks("one dies before collectives", PROCESSES, 3, one_dies_before_collectives, NULL);
  if (!on_gpus()) run_ranks("launch fails beside", THREADS, 3, a_launch_fails, NULL);
  return finish();
}
