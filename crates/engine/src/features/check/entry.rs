//! [`Entry`]: what a rank tells the others of one call, and its encoding in words.

use nccl_sys::{ncclAvg, ncclDataType_t, ncclRedOp_t};

use windlass_base::call::{Function, Shared};

/// Words of an entry, without the one that says that the entry is there.
pub(crate) const WORDS: usize = 6;
/// Stands in the place of a function for the registration of a window.
const WINDOW: u64 = 0xff;

/// A call of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A collective.
    Called(Called),
    /// `ncclCommWindowRegister`.
    Window(Window),
}

/// A collective. Variants of a function count as the same function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Called {
    /// The function. Never a send or a receive.
    pub function: Function,
    /// Elements, as the function counts them.
    pub count: u64,
    /// Type of an element.
    pub datatype: i32,
    /// NCCL's number of the reduction. [`OWN`] for reductions of the program, whose numbers may differ between ranks.
    pub reduction: Option<u16>,
    /// The root, if the function has one.
    pub root: Option<i32>,
    /// The place of the send buffer. None if it is in no window.
    pub send: Option<Place>,
    /// The place of the receive buffer. None if it is in no window.
    pub receive: Option<Place>,
}

/// Stands for every reduction of the program's own.
pub(crate) const OWN: u16 = u16::MAX - 1;

/// A place in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The number of the registration that made the window, from 1.
    pub window: u32,
    /// Whether the window was registered as symmetric.
    pub is_symmetric: bool,
    /// Bytes from the beginning of the window.
    pub offset: u64,
}

/// A registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Bytes of the window.
    pub bytes: u64,
    /// The flags that the program gave.
    pub flags: u32,
    /// Bytes of the allocation that holds the window. 0 if unknown.
    pub allocation: u64,
    /// Bytes from the beginning of the allocation to the window.
    pub offset: u64,
}

impl Called {
    /// The entry of a call. None if the call is no collective.
    pub(crate) fn of(shared: &Shared, send: Option<Place>, receive: Option<Place>) -> Option<Called> {
        let Shared { count, datatype, operation, root, .. } = *shared;
        let function = usual(shared.function)?;
        let reduction = operation.map(reduction);
        Some(Called { function, count: count as u64, datatype: datatype.0, reduction, root, send, receive })
    }

    /// Bytes that `count` elements take. None if the type is unknown.
    pub(crate) fn bytes(&self) -> Option<u64> {
        Some(self.count.saturating_mul(ncclDataType_t(self.datatype).size_bytes()? as u64))
    }

    /// Whether the function reduces. If not, NCCL moves bytes, so types may differ.
    pub(crate) fn reduces(&self) -> bool {
        matches!(self.function, Function::AllReduce | Function::Reduce | Function::ReduceScatter)
    }
}

fn reduction(operation: ncclRedOp_t) -> u16 {
    if (0..=ncclAvg.0).contains(&operation.0) { operation.0 as u16 } else { OWN }
}

/// The function that a variant stands for, since ranks may call it by different names.
fn usual(function: Function) -> Option<Function> {
    use Function::*;
    Some(match function {
        AllReduce | AllReduceConfig => AllReduce,
        Broadcast | Bcast | BroadcastConfig => Broadcast,
        Reduce | ReduceConfig => Reduce,
        AllGather | AllGatherConfig => AllGather,
        ReduceScatter | ReduceScatterConfig => ReduceScatter,
        AlltoAll | AlltoAllConfig => AlltoAll,
        Gather | GatherConfig => Gather,
        Scatter | ScatterConfig => Scatter,
        Send | Recv => return None,
    })
}

impl Entry {
    pub(crate) fn pack(&self) -> [u64; WORDS] {
        match self {
            Entry::Window(Window { bytes, flags, allocation, offset }) => {
                [WINDOW, u64::from(*flags), *bytes, 0, *allocation, *offset]
            }
            Entry::Called(called) => {
                let Called { function, count, datatype, reduction, root, send, receive } = *called;
                let plus_one = |reduction: u16| u64::from(reduction) + 1;
                let is_symmetric = |place: Option<Place>| u64::from(place.is_some_and(|at| at.is_symmetric));
                let window = |place: Option<Place>| u64::from(place.map_or(0, |at| at.window));
                let offset = |place: Option<Place>| place.map_or(0, |at| at.offset);
                let symmetric = is_symmetric(send) << 8 | is_symmetric(receive) << 9;
                let rooted = u64::from(root.is_some()) << 10;
                let reduces = reduction.map_or(0, plus_one) << 16;
                [
                    function as u64 | symmetric | rooted | reduces,
                    u64::from(root.unwrap_or(0) as u32) | u64::from(datatype as u32) << 32,
                    count,
                    window(send) | window(receive) << 32,
                    offset(send),
                    offset(receive),
                ]
            }
        }
    }

    /// Decodes an entry. None if no rank can have written these words.
    pub(crate) fn unpack(words: [u64; WORDS]) -> Option<Entry> {
        let [what, second, count, windows, send_offset, receive_offset] = words;
        if what & 0xff == WINDOW {
            let (allocation, offset) = (send_offset, receive_offset);
            return Some(Entry::Window(Window { bytes: count, flags: second as u32, allocation, offset }));
        }
        let place = |window: u32, symmetric: u32, offset: u64| {
            let is_symmetric = what >> symmetric & 1 != 0;
            (window != 0).then_some(Place { window, is_symmetric, offset })
        };
        Some(Entry::Called(Called {
            function: *Function::ALL.get((what & 0xff) as usize)?,
            count,
            datatype: (second >> 32) as u32 as i32,
            reduction: ((what >> 16) as u16).checked_sub(1),
            root: (what >> 10 & 1 != 0).then_some(second as u32 as i32),
            send: place(windows as u32, 8, send_offset),
            receive: place((windows >> 32) as u32, 9, receive_offset),
        }))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use nccl_sys::{ncclFloat32, ncclSum};
    use proptest::prelude::*;

    use super::*;

    fn place() -> impl Strategy<Value = Option<Place>> {
        let some = (1..=u32::MAX, any::<bool>(), any::<u64>());
        proptest::option::of(some.prop_map(|(window, is_symmetric, offset)| Place {
            window,
            is_symmetric,
            offset,
        }))
    }

    pub(crate) fn entry() -> impl Strategy<Value = Entry> {
        let buffers = (place(), place());
        let reduction = proptest::option::of(prop_oneof![0..5_u16, Just(OWN)]);
        let shared = (0..Function::ALL.len(), any::<u64>(), any::<i32>(), reduction, any::<Option<i32>>());
        let called = (shared, buffers).prop_map(|(shared, (send, receive))| {
            let (function, count, datatype, reduction, root) = shared;
            let function = Function::ALL[function];
            Entry::Called(Called { function, count, datatype, reduction, root, send, receive })
        });
        let window = any::<(u64, u32, u64, u64)>().prop_map(|(bytes, flags, allocation, offset)| {
            Entry::Window(Window { bytes, flags, allocation, offset })
        });
        prop_oneof![4 => called, 1 => window]
    }

    proptest! {
        /// An entry survives encoding and decoding.
        #[test]
        fn round_trip(entry in entry()) {
            prop_assert_eq!(Entry::unpack(entry.pack()), Some(entry));
        }

        /// Any words decode to an entry or to none.
        #[test]
        fn any_words(words: [u64; WORDS]) {
            let _ = Entry::unpack(words);
        }
    }

    /// Variants of a function are equal, as are the program's own reductions. Messages have no entry.
    #[test]
    fn told_alike() {
        let shared =
            |function, operation| Shared { function, count: 4, datatype: ncclFloat32, operation, root: None };
        let of = |function, operation| Called::of(&shared(function, operation), None, None);
        assert_eq!(of(Function::Send, None), None);
        assert_eq!(of(Function::Bcast, None), of(Function::BroadcastConfig, None));
        let sum = of(Function::AllReduce, Some(ncclSum)).unwrap();
        assert_eq!((sum.reduction, sum.bytes(), sum.reduces()), (Some(0), Some(16), true));
        let own = |number| of(Function::Reduce, Some(ncclRedOp_t(number)));
        assert_eq!(own(5), own(77));
        assert_ne!(own(4), own(5));
    }
}
