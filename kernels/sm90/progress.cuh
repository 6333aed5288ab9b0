// Counters in global memory by which thread blocks of one grid wait for each other.
#pragma once

#include "ptx.cuh"

/// Adds one after everything this thread has seen written, by itself or before a barrier, is visible.
__device__ __forceinline__ void red_release_gpu(int* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ int ld_acquire_gpu(const int* counter) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

/// Spins until the counter has reached `target`. One thread; the block's others follow by a barrier.
__device__ __forceinline__ void wait_for_count(const int* counter, int target) {
    while (ld_acquire_gpu(counter) < target) __nanosleep(32);
}

/// The next ticket of a queue. Whoever holds a ticket runs, so earlier ones are always being worked on.
__device__ __forceinline__ int take_ticket(int* queue) { return atomicAdd(queue, 1); }
