// Holds on a GPU that `add_two` has the bits of the fold in fp32 that it stands for: all 2^32 pairs of halves, and of bfloats.
//
//   nvcc -O2 -std=c++17 -arch=sm_90 two_sums.cu -o two_sums
#include <cuda_runtime.h>

#include <cstdio>

#include "../device/reduction.cuh"

template <class Reducer>
__global__ void compare(unsigned long long* unlike) {
  const uint64_t four = 0x0001000100010001, a = blockIdx.x * four;
  for (uint64_t b = threadIdx.x; b < 1 << 16; b += blockDim.x) {
    const uint64_t words[2] = {a, b * four};
    const uint64_t fold = fold_words<Reducer>(words, 2, Reduction{0, 0x3f800000}), sum = Reducer::add_two(words[0], words[1]);
    if (fold != sum && atomicAdd(unlike, 1) == 0) printf("%04llx and %04llx: %016llx, expected %016llx\n", (unsigned long long)(a & 0xffff), (unsigned long long)b, (unsigned long long)sum, (unsigned long long)fold);
  }
}

template <class Reducer>
bool holds(const char* name) {
  unsigned long long* unlike;
  if (cudaMallocManaged(&unlike, sizeof *unlike)) return false;
  *unlike = 0;
  compare<Reducer><<<1 << 16, 256>>>(unlike);
  const cudaError_t code = cudaDeviceSynchronize();
  printf("%s: %s, %llu of 2^32 pairs have other bits\n", name, cudaGetErrorString(code), *unlike);
  return code == cudaSuccess && *unlike == 0;
}

int main() {
  const bool halves = holds<SumF16>("halves"), bfloats = holds<SumBf16>("bfloats");
  return !(halves && bfloats);
}
