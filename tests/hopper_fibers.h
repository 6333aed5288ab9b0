// The threads of hopper_on_cpu.h: every CUDA thread is a fiber; a collective suspends it until its partners
// have arrived. Warps and blocks advance at random speeds, some fall far behind, and bulk copies land late,
// so that a missing barrier shows. When nothing can advance any more, the launch fails and says who waits
// for what.
#pragma once
#include "fiber_context.h"

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

struct Index { unsigned x = 0, y = 0, z = 0; };
inline Index threadIdx, blockIdx, gridDim, blockDim;

namespace emulator {

constexpr size_t STACK = 96 << 10, SHARED_BYTES = 227 << 10, STATIC_BYTES = 1 << 10;
constexpr unsigned PATIENCE = 50000;  // rounds without an event that make a deadlock: far more than a block rests

struct Meeting { int waiting = 0, alive = 0, generation = 0; };
struct Phase { int arrivals, pending, bytes, parity; };  // of an mbarrier
struct Product {  // one wgmma of one warp
    int columns;
    bool half, accumulate, from_shared;
    uint64_t left, right;  // descriptors
    int element_bytes;     // of both operands: 1, e4m3, or 2, f16
    void* sums[32];        // each lane's registers
    const uint32_t* a[32];
};
struct Warp {
    Meeting all;
    uint64_t values[2][32];  // what the lanes put into a collective, by turns
    std::deque<Product> products;
    std::deque<size_t> groups;  // where each committed one ends, in products since the kernel began
    size_t done, issued[32];    // products finished, and issued by each lane
    unsigned wake;              // the warp rests until this round
};
struct Block {
    unsigned index, rank;
    int running;
    Block* const* cluster;  // by rank
    Meeting together;       // of the cluster, in its first block
    Meeting all, named[16];
    Warp warps[32];
    unsigned slow;  // the warp that advances least often
    std::map<uint32_t, Phase> phases;
    alignas(1024) uint8_t memory[SHARED_BYTES + STATIC_BYTES];
};
struct Fiber {
    Context context;
    std::vector<char> stack = std::vector<char>(STACK);
    bool done;
    bool (*ready)(const void*);  // null: it may go on
    const void* waits_for;
    const char* what;
    uint32_t detail;
    int cluster_generation;
};
struct Copy { unsigned due; std::function<void()> land; };

inline Context scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Block*> blocks;
inline Block* block;
inline Fiber* fiber;
inline std::function<void()> body;
inline std::mt19937 chance(1);
inline int laggard = -1;          // the warp of every block that all others outrun; -1: one drawn, less slow
inline std::vector<Copy> copies;  // on their way
inline unsigned rounds, last_event;  // rounds so far, and when something last changed for another warp
inline std::string failure;

inline void leave() { fiber->context.leave_for(scheduler); }

/// Ends the launch with a message.
inline void fail(const char* format, ...) {
    char text[256];
    va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof(text), format, values);
    va_end(values);
    if (failure.empty())
        failure = "block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x) + ": " + text;
    leave();
}

/// Turns of a loop that waits for memory to change.
inline void poll() {
    fiber->what = "a change of memory";
    leave();
}
/// Lets others go first now and then.
inline void stumble() {
    if (chance() % 4 == 0) leave();
}
template <typename Ready> void wait_until(const char* what, uint32_t detail, const Ready& ready) {
    if (ready()) return;
    fiber->ready = [](const void* own) { return (*static_cast<const Ready*>(own))(); };
    fiber->waits_for = &ready;
    fiber->what = what;
    fiber->detail = detail;
    leave();
    fiber->ready = nullptr;
}

inline void event() { last_event = rounds; }

inline bool complete(Meeting& meeting) {
    if (!meeting.waiting || meeting.waiting < meeting.alive) return false;
    if (meeting.alive > 32) event();
    meeting.waiting = 0;
    ++meeting.generation;
    return true;
}
/// Waits for the others; the last to come does `last` before anyone goes on.
template <typename Last> void meet(Meeting& meeting, const char* what, Last last) {
    const int generation = meeting.generation;
    if (++meeting.waiting >= meeting.alive) last();
    if (!complete(meeting)) wait_until(what, 0, [&, generation] { return meeting.generation != generation; });
}
inline void meet(Meeting& meeting, const char* what) { meet(meeting, what, [] {}); }
inline Warp& warp() { return block->warps[threadIdx.x / 32]; }

/// Every lane hands in a value; `pick(lanes, own lane)` chooses from all of them.
template <typename T, typename Pick> auto exchange(T own, Pick pick) {
    Warp& mine = warp();
    uint64_t* lanes = mine.values[mine.all.generation & 1];
    std::memcpy(lanes + threadIdx.x % 32, &own, sizeof(T));
    meet(mine.all, "its warp");
    T all[32];
    for (int lane = 0; lane < 32; ++lane) std::memcpy(all + lane, lanes + lane, sizeof(T));
    return pick(all, static_cast<int>(threadIdx.x % 32));
}

inline void enter() {
    body();
    fiber->done = true;
    event();
    --warp().all.alive;
    --block->all.alive;
    --block->cluster[0]->together.alive;
    --block->running;
    complete(warp().all);
    complete(block->all);
    complete(block->cluster[0]->together);
    leave();
}

inline void start(unsigned at, unsigned index, unsigned threads, unsigned cluster, Fiber* its) {
    Block& fresh = *blocks[at];
    fresh.index = index;
    fresh.rank = index % cluster;
    fresh.cluster = &blocks[at - fresh.rank];
    fresh.running = threads;
    fresh.together = {0, static_cast<int>(threads * cluster), 0};
    fresh.all = {0, static_cast<int>(threads), 0};
    for (Meeting& meeting : fresh.named) meeting = {};
    fresh.slow = laggard >= 0 ? laggard : chance() % (threads / 32 + 1);
    for (unsigned w = 0; w < 32; ++w) {
        Warp& warp = fresh.warps[w];
        warp.all = {0, std::clamp<int>(threads - 32 * w, 0, 32), 0};
        warp.products.clear();
        warp.groups.clear();
        warp.done = warp.wake = 0;
        std::fill(warp.issued, warp.issued + 32, 0);
    }
    fresh.phases.clear();
    std::memset(fresh.memory, 0xff, sizeof(fresh.memory));
    for (unsigned t = 0; t < threads; ++t) {
        its[t].done = false;
        its[t].ready = nullptr;
        its[t].context.make(its[t].stack.data(), STACK, enter);
    }
}

/// Lets the threads of a block run until they have to wait.
inline void advance(Block& chosen, unsigned threads, Fiber* its) {
    block = &chosen;
    const unsigned warps = (threads + 31) / 32, first = chance() % warps, turn = chance() % 32;
    for (unsigned at = 0; at < warps; ++at) {
        const unsigned w = (first + at) % warps;
        Warp& warp = chosen.warps[w];
        if (warp.wake <= rounds && chance() % 64 == 0) warp.wake = rounds + (1 << chance() % 8);
        if (warp.wake > rounds || (w == chosen.slow && chance() % (laggard >= 0 ? 50 : 8))) continue;
        for (unsigned l = 0; l < 32; ++l) {
            const unsigned t = 32 * w + (turn + l) % 32;
            if (t >= threads || its[t].done || (its[t].ready && !its[t].ready(its[t].waits_for))) continue;
            fiber = its + t;
            threadIdx.x = t;
            blockIdx.x = chosen.index;
            scheduler.leave_for(fiber->context);
            if (!failure.empty()) return;
        }
    }
}

inline void land_copies() {
    std::shuffle(copies.begin(), copies.end(), chance);
    for (size_t at = 0; at < copies.size();) {
        if (copies[at].due > rounds) {
            ++at;
            continue;
        }
        copies[at].land();
        event();
        copies[at] = std::move(copies.back());
        copies.pop_back();
    }
}

inline void report_deadlock(unsigned first, unsigned count, unsigned threads) {
    failure = "nothing can advance:";
    for (unsigned b = 0; b < count; ++b) {
        std::map<std::string, std::string> waiting;
        for (unsigned t = 0; t < threads; ++t) {
            const Fiber& its = fibers[b * threads + t];
            char what[64];
            std::snprintf(what, sizeof(what), its.ready && its.detail ? "%s %#x" : "%s", its.what, its.detail);
            if (!its.done) waiting[what] += " " + std::to_string(t);
        }
        for (const auto& [what, who] : waiting)
            failure += "\nblock " + std::to_string(first + b) + " waits for " + what + ":" + who.substr(0, 60);
    }
}

/// Runs blocks [first, first + count) of a grid side by side.
inline void run_together(unsigned first, unsigned count, unsigned threads, unsigned cluster) {
    while (blocks.size() < count) blocks.push_back(new Block);
    if (fibers.size() < count * threads) fibers.resize(count * threads);
    copies.clear();
    rounds = last_event = 0;
    for (unsigned b = 0; b < count; ++b) start(b, first + b, threads, cluster, &fibers[b * threads]);
    std::vector<unsigned> order(count), wakes(count);
    for (unsigned b = 0; b < count; ++b) order[b] = b;
    for (unsigned left = count; left; ++rounds) {
        std::shuffle(order.begin(), order.end(), chance);
        left = 0;
        land_copies();
        for (unsigned b : order) {
            left += blocks[b]->running > 0;
            if (count > 1 && chance() % 64 == 0) wakes[b] = rounds + chance() % 256;  // a block falls far behind
            if (rounds < wakes[b]) continue;
            for (unsigned speed = count == 1 ? 1 : chance() % 12; speed && blocks[b]->running; --speed) {
                advance(*blocks[b], threads, &fibers[b * threads]);
                if (!failure.empty()) return;
            }
        }
        if (rounds - last_event == PATIENCE) return report_deadlock(first, count, threads);
    }
}

/// Returns null, or what went wrong.
inline const char* launch(unsigned grid, unsigned threads, bool together, unsigned cluster, std::function<void()> kernel) {
    body = std::move(kernel);
    gridDim.x = grid;
    blockDim.x = threads;
    failure.clear();
    const unsigned count = together ? grid : cluster;
    for (unsigned b = 0; b < grid && failure.empty(); b += count) run_together(b, count, threads, cluster);
    return failure.empty() ? nullptr : failure.c_str();
}

}  // namespace emulator
