/* Holds that the harness fails where it must. Each mode is a run that must end with a failure, which CTest expects. */
#include "../support/collective.h"

#include <string.h>
#include <unistd.h>

static void wrong_check(struct rank* self) { EQUAL(self->rank, 0); }

static void wrong_code(struct rank* self) {
  CODE(ncclGetVersion(NULL), self->rank == 1 ? ncclSuccess : ncclInvalidArgument);
}

/* Rank 1 dies, for which the others would wait for ever. */
static void dead_rank(struct rank* self) {
  CHECK(true);
  if (self->rank == 1) _exit(3);
  meet(self);
}

static void stays(struct rank* self) {
  if (self->rank == 1) pause();
  meet(self);
}

static void never_ends(struct rank* self) {
  CHECK(true);
  RUN_PART(stays, self);
}

static void checks_nothing(struct rank* self) { (void)self; }

/* One byte of an input differs from the one that the reference computes with. */
static void wrong_byte(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  struct transfer transfer = {.which = ALL_GATHER, .type = ncclInt8, .op = ncclSum, .count = 99, .rank = self->rank,
                              .ranks = self->ranks, .key = 1};
  transfer_prepare(&transfer);
  if (self->rank == 1) device_fill((char*)transfer.input + 42, 0x7f, 1);
  transfer_launch(&transfer, communicator, self->stream);
  wait_for(self->stream);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

static const struct { const char* name; void (*body)(struct rank*); } MODES[] = {
    {"wrong-check", wrong_check}, {"wrong-code", wrong_code},         {"dead-rank", dead_rank},
    {"never-ends", never_ends},   {"checks-nothing", checks_nothing}, {"wrong-byte", wrong_byte},
};

int main(int count, char** words) {
  bool never_ends = count > 1 && strcmp(words[1], "never-ends") == 0;
  begin("harness_proof", never_ends ? 4 : 60);
  for (size_t i = 0; i < sizeof MODES / sizeof MODES[0] && count > 1; i++) {
    if (strcmp(words[1], MODES[i].name)) continue;
    run_ranks(MODES[i].name, PROCESSES, rank_count(2), MODES[i].body, NULL);
    return finish();
  }
  /* An unknown mode must not look like the expected failure. */
  return STATUS_PASSED;
}
