// Matrix products on one stream beside collectives on another, on two GPUs with a thread each: how long each of both took, and
// where it lay. It tells whether a collective's blocks cost a product a wave.
//
//   nvcc -O2 -std=c++20 -arch=sm_90 -I NCCL/include beside.cu -o beside -L NCCL/lib -l:libnccl.so.2 -lcublas
//   LD_LIBRARY_PATH=FOLDER_OF_NCCL_OR_WINDLASS ./beside SIDE BYTES CALLS (ag|rs) [1: every call of the last batch]
// SIDE: of square bf16 matrices. BYTES: of the whole collective.

#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#define CHECK(call)                                                                   \
    do {                                                                              \
        auto code_ = (call);                                                          \
        if (code_) {                                                                  \
            fprintf(stderr, "%s answered %d, line %d\n", #call, (int)code_, __LINE__); \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

constexpr int RANKS = 2, BATCHES = 15, WARM_UP = 3;
enum Mode { ALONE, BESIDE, TIMED };  // TIMED: events around every product and collective
const char *const NAMES[] = {"alone", "beside", "timed"};

struct Span {
    cudaEvent_t begin, end;
};

static float us(cudaEvent_t begin, cudaEvent_t end) {
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    return ms * 1e3f;
}

static float at(std::vector<float> &of, float fraction) {
    std::sort(of.begin(), of.end());
    return of[(size_t)(fraction * (of.size() - 1))];
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    const int side = atoi(argv[1]), calls = atoi(argv[3]);
    const size_t bytes = strtoull(argv[2], nullptr, 10), matrix = (size_t)side * side * 2;
    const bool gathers = std::string(argv[4]) == "ag", tells_all = argc > 5;
    ncclComm_t communicators[RANKS];
    CHECK(ncclCommInitAll(communicators, RANKS, nullptr));
    std::barrier<> together(RANKS);
    auto rank = [&](int me) {
        CHECK(cudaSetDevice(me));
        cublasHandle_t blas;
        CHECK(cublasCreate(&blas));
        cudaStream_t products, collectives;
        CHECK(cudaStreamCreate(&products));
        CHECK(cudaStreamCreate(&collectives));
        CHECK(cublasSetStream(blas, products));
        void *left, *right, *result, *send, *receive;
        for (void **at : {&left, &right, &result}) {
            CHECK(cudaMalloc(at, matrix));
            CHECK(cudaMemset(*at, 0, matrix));
        }
        CHECK(cudaMalloc(&send, bytes + 256));
        CHECK(cudaMalloc(&receive, bytes + 256));
        const float one = 1, zero = 0;
        auto multiply = [&] {
            CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, side, side, side, &one, left, CUDA_R_16BF, side, right,
                               CUDA_R_16BF, side, &zero, result, CUDA_R_16BF, side, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        };
        auto exchange = [&] {
            const size_t count = bytes / RANKS / 2;
            if (gathers) CHECK(ncclAllGather(send, receive, count, ncclBfloat16, communicators[me], collectives));
            else CHECK(ncclReduceScatter(send, receive, count, ncclBfloat16, ncclSum, communicators[me], collectives));
        };
        for (int call = 0; call < 8; call++) {
            multiply();
            exchange();
            CHECK(cudaDeviceSynchronize());
            together.arrive_and_wait();
        }
        cudaEvent_t begin, half, end;
        for (cudaEvent_t *event : {&begin, &half, &end}) CHECK(cudaEventCreate(event));
        std::vector<Span> product(calls), exchanged(calls);
        for (auto *spans : {&product, &exchanged})
            for (Span &span : *spans) {
                CHECK(cudaEventCreate(&span.begin));
                CHECK(cudaEventCreate(&span.end));
            }
        for (Mode mode : {ALONE, BESIDE, TIMED}) {
            std::vector<float> whole, of_products, of_exchanges;
            for (int batch = 0; batch < BATCHES; batch++) {
                CHECK(cudaDeviceSynchronize());
                together.arrive_and_wait();
                CHECK(ncclAllReduce(send, send, 1, ncclFloat, ncclSum, communicators[me], products));  // both begin now
                CHECK(cudaEventRecord(begin, products));
                CHECK(cudaStreamWaitEvent(collectives, begin));
                for (int call = 0; call < calls; call++) {
                    if (mode == TIMED) CHECK(cudaEventRecord(product[call].begin, products));
                    multiply();
                    if (mode == TIMED) CHECK(cudaEventRecord(product[call].end, products));
                    if (mode == TIMED) CHECK(cudaEventRecord(exchanged[call].begin, collectives));
                    if (mode != ALONE) exchange();
                    if (mode == TIMED) CHECK(cudaEventRecord(exchanged[call].end, collectives));
                }
                CHECK(cudaEventRecord(half, collectives));
                CHECK(cudaStreamWaitEvent(products, half));
                CHECK(cudaEventRecord(end, products));
                CHECK(cudaDeviceSynchronize());
                if (batch < WARM_UP) continue;
                whole.push_back(us(begin, end) / calls);
                if (mode != TIMED) continue;
                for (int call = 0; call < calls; call++) {
                    of_products.push_back(us(product[call].begin, product[call].end));
                    of_exchanges.push_back(us(exchanged[call].begin, exchanged[call].end));
                    if (me || !tells_all || batch + 1 < BATCHES) continue;
                    printf("    product %6.0f ... %6.0f  collective %6.0f ... %6.0f\n", us(begin, product[call].begin),
                           us(begin, product[call].end), us(begin, exchanged[call].begin), us(begin, exchanged[call].end));
                }
            }
            if (me) continue;
            printf("%-6s %8.1f us a call (%.1f ... %.1f)", NAMES[mode], at(whole, .5f), at(whole, 0), at(whole, 1));
            if (mode == TIMED)
                printf("; products %.0f, %.0f, %.0f; collectives %.1f, %.1f, %.1f (10, 50, 90 %%)", at(of_products, .1f),
                       at(of_products, .5f), at(of_products, .9f), at(of_exchanges, .1f), at(of_exchanges, .5f), at(of_exchanges, .9f));
            printf("\n");
            fflush(stdout);
        }
    };
    std::vector<std::thread> threads;
    for (int me = 0; me < RANKS; me++) threads.emplace_back(rank, me);
    for (auto &thread : threads) thread.join();
    for (auto communicator : communicators) CHECK(ncclCommDestroy(communicator));
}
