/* Teams: communicators of a few consecutive ranks of a section, so that every rank is in one team of each size; and the
 * statement of whether NCCL must build each, if it is lazy. */
#ifndef WINDLASS_CTESTS_TEAM_H
#define WINDLASS_CTESTS_TEAM_H

#include "collective.h"
#include "messages.h"

/* This rank's team. Without a communicator this rank is in none. */
struct team { ncclComm_t communicator; int rank, ranks; };

/* What a program states of a lazy communicator: NCCL never builds it; NCCL builds it; nothing. The runner compares the reports
 * with these statements (--unbuilt). */
enum build { UNBUILT, BUILT, EITHER };
/* States that of one communicator of this rank, if communicators of `ranks` ranks are lazy. */
void expect_lazy(int ranks, enum build build);

/* Makes a team of every `ranks` consecutive ranks of the section, whose number `ranks` divides. */
struct team team_made(struct rank* self, int ranks, enum build build);
/* An id for this rank's team, made by its first rank. */
ncclUniqueId team_id(struct rank* self, int ranks);
int team_next(const struct team* team);
int team_before(const struct team* team);

/* How often each of the next three functions calls `together`, also for a rank without a team. So teams of different sizes may
 * work at the same time. */
enum { TEAM_STEPS = 2 };
/* An all-reduce. */
void team_reduces(struct rank* self, const struct team* team, uint64_t key);
/* One collective of any kind; `what` has all but the ranks. */
void team_runs(struct rank* self, const struct team* team, struct transfer what);
/* Every rank sends to the next and receives from the one before, both at once. */
void team_passes(struct rank* self, const struct team* team, size_t bytes, uint64_t key);
/* Holds that the communicator's count, rank, device and state are right. */
void team_knows_itself(struct rank* self, const struct team* team);

#endif
