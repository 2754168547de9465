// Launches that overlap with the one before: a file that includes this has such kernels only.
//
// A decoding step is some 180 launches of 2 to 7 us, and each one's first microseconds are its own affair: blocks are
// placed, code and weights are fetched. So such a kernel may be started while the launch before it still runs
// (programmatic dependent launch, from sm_90 on; backends/cuda/early.py asks for it). Until `wait_for_earlier` it may
// touch only what no kernel of a step writes: weights, scales, norms. Every block must call it, also one without work:
// the launch after this one takes its end for the end of all before it.
#pragma once

/* Waits until the launch before has ended and what it wrote can be read. */
__device__ __forceinline__ void wait_for_end_of_earlier() {
#if !defined(BITNET_REF_EMULATED) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The same, where the next launch may be started from here on. Measured on an H200, a step of 2B-4T with 1, 8 and 32
 * rows: 0.89, 0.94 and 0.95 of the time. With 128 it took 1.16: the next launch then takes room that this one's blocks,
 * or its own loads, need. So `ternary_gemm` lets nothing start. */
__device__ __forceinline__ void wait_for_earlier() {
#if !defined(BITNET_REF_EMULATED) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    wait_for_end_of_earlier();
}
