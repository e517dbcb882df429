/* Holds that Windlass's worker thread sleeps while communicators only live, and while they only run collectives: at most one wake-up a
 * second and process, also after sends. While sends are issued it looks four times a second whether they have room. The argument: how many
 * communicators, 4. Standard error has the figures. */
#include "../support/harness.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { COMMUNICATORS_MAX = 256, COUNT = 64, SECONDS = 1 };

static int communicators = 4;

struct work { long wakeups; double busy_ms; };

static bool read_file(const char* path, char* text, size_t bytes) {
  FILE* file = fopen(path, "r");
  if (!file) return false;
  text[fread(text, 1, bytes - 1, file)] = 0;
  fclose(file);
  return true;
}

/* What the worker of this process has done so far. Nothing without Windlass. */
static struct work worker_now(void) {
  struct work work = {0, 0};
  char path[320], text[4096];
  DIR* tasks = opendir("/proc/self/task");
  if (!CHECK(tasks != NULL)) return work;
  for (struct dirent* task; (task = readdir(tasks));) {
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
    if (!read_file(path, text, sizeof text) || strcmp(text, "windlass-worker\n")) continue;
    snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
    const char* line = read_file(path, text, sizeof text) ? strstr(text, "\nvoluntary_ctxt_switches:") : NULL;
    if (CHECK(line != NULL)) work.wakeups = atol(strchr(line, ':') + 1);
    snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", task->d_name);
    if (read_file(path, text, sizeof text)) work.busy_ms = atof(text) / 1e6;
  }
  closedir(tasks);
  return work;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

struct scene {
  ncclComm_t communicators[COMMUNICATORS_MAX];
  int32_t *in, *out;
};

static void all_reduces(struct rank* self, const struct scene* scene) {
  for (int i = 0; i < communicators; i++) {
    NCCL(ncclAllReduce(scene->in, scene->out, COUNT, ncclInt32, ncclSum, scene->communicators[i], as_cuda(self->stream)));
  }
  wait_for(self->stream);
}

static void sends(struct rank* self, const struct scene* scene) {
  ncclComm_t communicator = scene->communicators[0];
  NCCL(ncclGroupStart());
  NCCL(ncclSend(scene->in, COUNT, ncclInt32, (self->rank + 1) % self->ranks, communicator, as_cuda(self->stream)));
  NCCL(ncclRecv(scene->out, COUNT, ncclInt32, (self->rank + self->ranks - 1) % self->ranks, communicator, as_cuda(self->stream)));
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
}

static void nothing(struct rank* self, const struct scene* scene) {
  (void)self, (void)scene;
  usleep(100000);
}

/* Runs `act` for some seconds. The number of rounds differs between ranks, so they agree on the last one. */
static void watch(struct rank* self, const struct scene* scene, const char* what, void (*act)(struct rank*, const struct scene*),
                  long a_second) {
  int32_t ends[COUNT] = {0}, host[COUNT];
  long rounds = 0;
  meet(self);
  struct work before = worker_now();
  double begin = now();
  for (host[0] = 0; host[0] == 0; rounds++) {
    act(self, scene);
    ends[0] = act == nothing ? 0 : now() - begin >= SECONDS;
    if (act == nothing ? rounds >= 10 * SECONDS : rounds % 16 == 15) {
      host[0] = 1;
      if (act != nothing) {
        upload(scene->in, ends, sizeof ends);
        all_reduces(self, scene);
        download(host, scene->out, sizeof host);
      }
    }
  }
  double seconds = now() - begin;
  struct work after = worker_now();
  long wakeups = after.wakeups - before.wakeups;
  if (!CHECK(wakeups <= a_second * ((long)seconds + 1)) || self->rank == 0) {
    fprintf(stderr, "%s: %ld wake-ups and %.2f ms of the worker in %.1f s, %ld rounds\n", what, wakeups, after.busy_ms - before.busy_ms,
            seconds, rounds);
  }
}

static void body(struct rank* self) {
  struct scene scene = {.in = device_alloc(COUNT * sizeof(int32_t)), .out = device_alloc(COUNT * sizeof(int32_t))};
  for (int i = 0; i < communicators; i++) scene.communicators[i] = world(self, i % SLOTS_MAX), meet(self);
  device_fill(scene.in, 0, COUNT * sizeof(int32_t));
  all_reduces(self, &scene);
  /* What an init leaves to do is done. */
  usleep(700000);
  watch(self, &scene, "idle", nothing, 1);
  watch(self, &scene, "all-reduces", all_reduces, 1);
  watch(self, &scene, "sends", sends, 6);
  usleep(1300000);
  watch(self, &scene, "idle after sends", nothing, 1);
  for (int i = 0; i < communicators; i++) NCCL(ncclCommDestroy(scene.communicators[i]));
  device_free(scene.in);
  device_free(scene.out);
}

int main(int count, char** arguments) {
  begin("wakeups", 100);
  if (count > 1) communicators = atoi(arguments[1]);
  run_ranks("processes", PROCESSES, rank_count(2), body, NULL);
  return finish();
}
