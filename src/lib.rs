//! The ABI layer of Windlass: exported C functions, nothing else.
//!
//! * [`entries`]: every public name of NCCL, as a few instructions each.
//! * [`first_use`]: what the very first call does.
//! * [`seen`]: the Rust code of the entry points that the engine looks at.
//! * [`translate`]: NCCL's own handle in place of ours, where no other argument is ours to know.
//! * [`profiler`]: the symbols of a profiler plugin.
//! * [`extra`]: the few functions of our own (`windlass.h`).

mod entries;

mod first_use;

mod seen;

mod translate;

mod profiler;

mod extra;
