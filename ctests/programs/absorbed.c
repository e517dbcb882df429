/* Holds that a send completes before its receive is posted as far as it does with NCCL, so both ranks of a pair may send first.
 * Cases: eight messages, small or 48 MiB in all, or one message of 48 MiB. */
#include "../support/messages.h"

/* Both ranks send `count` messages and only then receive, in one stream and without groups: NCCL absorbs 64 MiB between
 * two ranks, and 8 messages. */
static void send_first(struct rank* self, ncclComm_t communicator, int count, size_t bytes) {
  struct message from[8], to[8];
  int peer = 1 - self->rank;
  for (int i = 0; i < count; i++) {
    from[i] = message_to_send((uint64_t)(i * 2 + self->rank), bytes, 0);
    to[i] = message_to_receive((uint64_t)(i * 2 + peer), bytes, 0);
  }
  for (int i = 0; i < count; i++) message_send(&from[i], peer, communicator, self->stream);
  meet(self);
  for (int i = 0; i < count; i++) message_receive(&to[i], peer, communicator, self->stream);
  wait_for(self->stream);
  for (int i = 0; i < count; i++) {
    message_verify(&to[i], self);
    message_release(&from[i]);
    message_release(&to[i]);
  }
}

static int wanted_count;
static char** wanted_names;

static void absorbed(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  acquaint(self, communicator, self->rank);
  if (is_wanted(wanted_count, wanted_names, "deferred")) send_first(self, communicator, 8, 100);
  if (is_wanted(wanted_count, wanted_names, "deferred")) send_first(self, communicator, 8, 256 << 10);
  if (is_wanted(wanted_count, wanted_names, "deferred_large")) send_first(self, communicator, 8, 6 << 20);
  if (is_wanted(wanted_count, wanted_names, "head_to_head")) {
    for (int round = 0; round < 3; round++) send_first(self, communicator, 1, (size_t)48 << 20);
  }
  NCCL(ncclCommDestroy(communicator));
}

int main(int count, char** arguments) {
  wanted_count = count;
  wanted_names = arguments;
  begin("absorbed", 180);
  rank_count(2);
  run_ranks("absorbed", PROCESSES, 2, absorbed, NULL);
  return finish();
}
