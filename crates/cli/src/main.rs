//! x
mod collective; mod element; mod gpu; mod nccl; mod ranks;
fn main() {}
