/* Holds that many pair communicators, over all pairs of ranks in turn, live at once, and that each carries a message both ways.
 * Says on standard error what they cost rank 0: device memory, and how long each took to make, to carry its first messages and
 * to end. The argument is their number. */
#include "../support/held.h"
#include "../support/team.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAIRS_MAX = 1024, BYTES = 1 << 20 };

static double milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static int by_size(const void* left, const void* right) {
  double difference = *(const double*)left - *(const double*)right;
  return (difference > 0) - (difference < 0);
}

/* Prints the median and the longest of the times of this rank's pairs. */
static void say(struct rank* self, const char* what, double* times, int count) {
  if (self->rank != 0 || !count) return;
  qsort(times, (size_t)count, sizeof *times, by_size);
  fprintf(stderr, "many_pairs: %s: median %.2f ms, longest %.2f ms of %d\n", what, times[count / 2], times[count - 1], count);
}

static void say_held(struct rank* self, const char* when, const struct held* start) {
  struct held now = held_now();
  if (self->rank != 0) return;
  fprintf(stderr, "many_pairs: %s: device memory %+.1f MiB, descriptors %+d, threads %+d\n", when,
          ((double)now.device_bytes - (double)start->device_bytes) / (1 << 20), now.descriptors - start->descriptors,
          now.threads - start->threads);
}

static void live_at_once(struct rank* self) {
  int count = *(int*)self->argument, mine = 0, low = 0, high = 1;
  static _Thread_local struct team teams[PAIRS_MAX];
  static _Thread_local double times[PAIRS_MAX];
  meet(self);
  struct held start = held_now();
  meet(self);
  for (int pair = 0; pair < count; pair++) {
    ncclUniqueId id = share_id(self, 0, low);
    if (self->rank == low || self->rank == high) {
      double began = milliseconds();
      teams[mine] = (struct team){NULL, self->rank == high, 2};
      NCCL(ncclCommInitRank(&teams[mine].communicator, 2, id, teams[mine].rank));
      times[mine++] = milliseconds() - began;
      expect_lazy(2, UNBUILT);
    } else {
      teams[mine].communicator = NULL;
    }
    if (++high < self->ranks) continue;
    high = (low = (low + 1) % (self->ranks - 1)) + 1;
  }
  say(self, "creation", times, mine);
  meet(self);
  say_held(self, "after creation", &start);
  struct message from = message_to_send((uint64_t)self->rank, BYTES, 0), to = message_to_receive(0, BYTES, 0);
  low = 0, high = 1;
  for (int pair = 0, own = 0; pair < count; pair++) {
    meet(self);
    if (self->rank == low || self->rank == high) {
      const struct team* team = &teams[own];
      message_clear(&to, (uint64_t)(team->rank ? low : high));
      double began = milliseconds();
      NCCL(ncclGroupStart());
      message_send(&from, team_next(team), team->communicator, self->stream);
      message_receive(&to, team_before(team), team->communicator, self->stream);
      NCCL(ncclGroupEnd());
      wait_for(self->stream);
      times[own++] = milliseconds() - began;
      message_verify(&to, self);
    }
    if (++high < self->ranks) continue;
    high = (low = (low + 1) % (self->ranks - 1)) + 1;
  }
  message_release(&from);
  message_release(&to);
  say(self, "first exchange", times, mine);
  meet(self);
  say_held(self, "after an exchange each", &start);
  meet(self);
  for (int own = 0; own < mine; own++) {
    double began = milliseconds();
    NCCL(ncclCommDestroy(teams[own].communicator));
    times[own] = milliseconds() - began;
  }
  say(self, "destroy", times, mine);
  meet(self);
  say_held(self, "after destroy", &start);
  meet(self);
  /* Memory that peers have mapped is free only when they have closed it, too. NCCL keeps what its kernels need on a device. The
   * simulator's streams are threads of the process. */
  double began = milliseconds();
  struct held room = {.descriptors = 64, .threads = 1000, .mappings = 10000, .device_bytes = (size_t)16 << 20};
  const char* guard = getenv("WINDLASS_FIRST_LAUNCH_GUARD");
  if (!guard || strcmp(guard, "off")) room.device_bytes = (size_t)512 << 20;
  CHECK(held_again(&start, &room));
  meet(self);
  say_held(self, "a while after destroy", &start);
  if (self->rank == 0) fprintf(stderr, "many_pairs: waited %.0f ms for that\n", milliseconds() - began);
  meet(self);
}

int main(int count, char** words) {
  begin("many_pairs", 280);
  /* A fixed number for each device, as each pair takes some multiprocessors of both devices. */
  int ranks = rank_count(4), pairs = 16 * ranks;
  if (count > 1) pairs = atoi(words[1]);
  if (pairs < 1 || pairs > PAIRS_MAX) skip("1 to 1024 pairs");
  run_ranks("pairs", PROCESSES, ranks, live_at_once, &pairs);
  return finish();
}
