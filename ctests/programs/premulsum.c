/* Holds that ncclRedOpCreatePreMulSum multiplies each rank's input by its scalar before the sum, with scalars on the host and on
 * the device. Several operations live at once, and a destroyed one cannot be used. */
#include "../support/reference.h"

#include <stdlib.h>
#include <string.h>

enum { COUNT = 2051, FACTOR = 3 };

static void scalar_of(void* to, ncclDataType_t type) {
  /* the scalar as an element: the reference's input 1 times FACTOR, converted by the reference */
  static const float single = FACTOR;
  static const double twice = FACTOR;
  static const int32_t whole = FACTOR;
  memcpy(to, type == ncclFloat ? (const void*)&single : type == ncclDouble ? (const void*)&twice : &whole,
         type_bytes(type));
}

static void multiplied(struct rank* self, ncclComm_t communicator, ncclDataType_t type, ncclScalarResidence_t where) {
  size_t bytes = COUNT * type_bytes(type);
  char* host = malloc(bytes);
  char* wanted = malloc(bytes);
  void* input = device_alloc(bytes);
  void* output = device_alloc(bytes);
  char scalar[8];
  scalar_of(scalar, type);
  void* on_device = device_alloc(sizeof scalar);
  upload(on_device, scalar, sizeof scalar);
  ncclRedOp_t op = ncclSum, spare = ncclSum;
  void* place = where == ncclScalarDevice ? on_device : scalar;
  NCCL(ncclRedOpCreatePreMulSum(&spare, place, type, where, communicator));
  NCCL(ncclRedOpCreatePreMulSum(&op, place, type, where, communicator));
  CHECK(op >= ncclNumOps && spare >= ncclNumOps && op != spare);
  NCCL(ncclRedOpDestroy(spare, communicator));
  uint64_t key = 100 + (uint64_t)type;
  input_fill(host, key, self->rank, 0, COUNT, type, ncclSum);
  upload(input, host, bytes);
  NCCL(ncclAllReduce(input, output, COUNT, type, op, communicator, as_cuda(self->stream)));
  /* Calls that were made before keep their destroyed operation. */
  NCCL(ncclRedOpDestroy(op, communicator));
  wait_for(self->stream);
  download(host, output, bytes);
  reduced_fill(wanted, key, self->ranks, 0, COUNT, type, ncclSum, FACTOR);
  CHECK(memcmp(host, wanted, bytes) == 0);
  record(self, host, bytes);
  CODE(ncclAllReduce(input, output, COUNT, type, op, communicator, as_cuda(self->stream)), ncclInvalidArgument);
  CODE(ncclRedOpDestroy(op, communicator), ncclInvalidArgument);
  CODE(ncclRedOpDestroy(ncclSum, communicator), ncclInvalidArgument);
  device_free(input);
  device_free(output);
  device_free(on_device);
  free(host);
  free(wanted);
}

static void all(struct rank* self) {
  static const ncclDataType_t types[] = {ncclFloat, ncclDouble, ncclInt32};
  ncclComm_t communicator = world(self, 0);
  for (int type = 0; type < 3; type++) {
    multiplied(self, communicator, types[type], ncclScalarHostImmediate);
    multiplied(self, communicator, types[type], ncclScalarDevice);
  }
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("premulsum", 60);
  run_ranks("premulsum", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
