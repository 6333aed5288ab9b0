// Contexts that the fibers of both emulations change between. ucontext starts one on a stack of its own; from
// then on it is left and entered by _setjmp and _longjmp, which spare two system calls a change.
#pragma once
#include <csetjmp>
#include <cstddef>
#include <ucontext.h>

struct Context {
    ucontext_t first;
    jmp_buf at;
    bool started = true;  // as whoever calls leave_for first is

    /// `entry` begins when the context is entered next. It must not return, but leave for another.
    void make(char* stack, size_t bytes, void (*entry)()) {
        getcontext(&first);
        first.uc_stack.ss_sp = stack;
        first.uc_stack.ss_size = bytes;
        first.uc_link = nullptr;
        makecontext(&first, entry, 0);
        started = false;
    }
    /// Goes on with `next`; returns when another leaves for this one.
    __attribute__((noinline)) void leave_for(Context& next) {
        if (_setjmp(at)) return;
        if (next.started) _longjmp(next.at, 1);
        next.started = true;
        setcontext(&next.first);
    }
};
