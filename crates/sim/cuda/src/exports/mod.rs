//! The C interface: one file per area, every function behind the guard.
#![allow(non_snake_case, reason = "the names are the driver's")]

/// Defines exported functions whose bodies return `Result<(), Code>`. A name after `/` is the twin for which the null
/// stream means the per-thread one.
macro_rules! exports {
    () => {};
    (fn $name:ident / $twin:ident $arguments:tt $body:block $($rest:tt)*) => {
        exports!(@function $name $arguments $body);
        exports!(@twin $twin $name $arguments);
        exports!($($rest)*);
    };
    (fn $name:ident $arguments:tt $body:block $($rest:tt)*) => {
        exports!(@function $name $arguments $body);
        exports!($($rest)*);
    };
    (@function $name:ident ($($argument:ident: $type:ty),* $(,)?) $body:block) => {
        // SAFETY: only the driver's own names are given here, and this library stands in for the driver.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> $crate::code::Code {
            $crate::guard::answer(stringify!($name), move || $body)
        }
    };
    (@twin $twin:ident $name:ident ($($argument:ident: $type:ty),* $(,)?)) => {
        // SAFETY: as above.
        #[unsafe(no_mangle)]
        pub extern "C" fn $twin($($argument: $type),*) -> $crate::code::Code {
            $crate::guard::with_per_thread_default(move || $name($($argument),*))
        }
    };
}

mod context;
mod device;
mod event;
mod general;
mod graph;
mod graph_nodes;
mod memory;
mod module;
mod names;
mod pool;
mod stream;
mod transfer;
mod unsupported;
mod user_object;
mod virtual_memory;
