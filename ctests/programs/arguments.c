/* Holds that null and wrong arguments get NCCL's own result codes, and that a refused call does not disturb later calls. */
#include "../support/collective.h"

#include <string.h>

/* Prints a call and its result code, on rank 0 only, and checks the code. */
#define ANSWERS(call, code) answers(self, CODE(call, code), #call, code)

static void answers(struct rank* self, bool right, const char* call, int code) {
  record(self, call, strlen(call));
  record(self, &code, sizeof code);
  (void)right;
}

static void without_communicator(struct rank* self) {
  ncclUniqueId id;
  ncclComm_t made = NULL;
  ncclResult_t state;
  int number;
  memset(&id, 0, sizeof id);
  ANSWERS(ncclGetVersion(NULL), ncclInvalidArgument);
  ANSWERS(ncclGetUniqueId(NULL), ncclInvalidArgument);
  NCCL(ncclGetUniqueId(&id));
  ANSWERS(ncclCommInitRank(NULL, 1, id, 0), ncclInvalidArgument);
  ANSWERS(ncclCommInitRank(&made, 0, id, 0), ncclInvalidArgument);
  ANSWERS(ncclCommInitRank(&made, 2, id, 2), ncclInvalidArgument);
  ANSWERS(ncclCommInitRank(&made, 2, id, -1), ncclInvalidArgument);
  ncclConfig_t configuration;
  memset(&configuration, 0, sizeof configuration);
  configuration.size = sizeof configuration;
  ANSWERS(ncclCommInitRankConfig(&made, 1, id, 0, &configuration), ncclInvalidArgument);
  ANSWERS(ncclCommInitAll(NULL, 1, NULL), ncclInvalidArgument);
  ANSWERS(ncclCommInitAll(&made, -1, NULL), ncclInvalidArgument);
  ANSWERS(ncclCommCount(NULL, &number), ncclInvalidArgument);
  ANSWERS(ncclCommCuDevice(NULL, &number), ncclInvalidArgument);
  ANSWERS(ncclCommUserRank(NULL, &number), ncclInvalidArgument);
  ANSWERS(ncclCommGetAsyncError(NULL, &state), ncclInvalidArgument);
  ANSWERS(ncclCommSplit(NULL, 0, 0, &made, NULL), ncclInvalidArgument);
  ANSWERS(ncclCommDestroy(NULL), ncclSuccess);
  ANSWERS(ncclCommAbort(NULL), ncclSuccess);
  ANSWERS(ncclCommFinalize(NULL), ncclSuccess);
  ANSWERS(ncclGroupEnd(), ncclInvalidUsage);
  ANSWERS(ncclMemFree(NULL), ncclSuccess);
  CHECK(made == NULL);
}

static void wrong_values(struct rank* self, ncclComm_t communicator) {
  void* buffer = device_alloc(4096);
  cudaStream_t stream = as_cuda(self->stream);
  const ncclDataType_t no_type = (ncclDataType_t)99;
  const ncclRedOp_t no_op = (ncclRedOp_t)99;
  int ranks = self->ranks;
  ANSWERS(ncclCommCount(communicator, NULL), ncclInvalidArgument);
  ANSWERS(ncclCommUserRank(communicator, NULL), ncclInvalidArgument);
  ANSWERS(ncclCommCuDevice(communicator, NULL), ncclInvalidArgument);
  ANSWERS(ncclCommGetAsyncError(communicator, NULL), ncclInvalidArgument);
  ANSWERS(ncclCommSplit(communicator, 0, 0, NULL, NULL), ncclInvalidArgument);
  ANSWERS(ncclAllReduce(buffer, buffer, 4, no_type, ncclSum, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclAllReduce(buffer, buffer, 4, ncclFloat, no_op, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclAllReduce(buffer, buffer, 4, ncclFloat, (ncclRedOp_t)-1, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclAllReduce(buffer, buffer, 4, ncclFloat, ncclSum, NULL, stream), ncclInvalidArgument);
  ANSWERS(ncclReduce(buffer, buffer, 4, ncclFloat, ncclSum, ranks, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclReduce(buffer, buffer, 4, ncclFloat, ncclSum, -1, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclReduceScatter(buffer, buffer, 4, no_type, ncclSum, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclBroadcast(buffer, buffer, 4, ncclFloat, ranks, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclBcast(buffer, 4, ncclFloat, -1, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclAllGather(buffer, buffer, 4, no_type, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclSend(buffer, 4, ncclFloat, ranks, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclRecv(buffer, 4, ncclFloat, -1, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclSend(buffer, 4, ncclFloat, 0, NULL, stream), ncclInvalidArgument);
  device_free(buffer);
}

/* An error within a group is also the result of ncclGroupEnd, and the next group is not affected. */
static void in_a_group(struct rank* self, ncclComm_t communicator) {
  void* buffer = device_alloc(4096);
  cudaStream_t stream = as_cuda(self->stream);
  NCCL(ncclGroupStart());
  ANSWERS(ncclAllReduce(buffer, buffer, 4, (ncclDataType_t)99, ncclSum, communicator, stream), ncclInvalidArgument);
  ANSWERS(ncclGroupEnd(), ncclInvalidArgument);
  NCCL(ncclGroupStart());
  NCCL(ncclGroupEnd());
  device_free(buffer);
}

static void all(struct rank* self) {
  without_communicator(self);
  ncclComm_t communicator = world(self, 0);
  wrong_values(self, communicator);
  in_a_group(self, communicator);
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 1000,
                              .rank = self->rank, .ranks = self->ranks, .key = 1};
  transfer_run(&transfer, communicator, self);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("arguments", 60);
  run_ranks("arguments", PROCESSES, rank_count(2), all, NULL);
  return finish();
}
