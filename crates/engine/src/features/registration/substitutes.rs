//! Computes what NCCL gets in place of a call's buffers, and what must be copied. Pure.

use windlass_base::gpu::Address;
use windlass_base::range::Range;

use crate::features::registration::staging::Copy;

/// The buffers of a call.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Buffers {
    pub send: Range,
    pub receive: Range,
}

/// The addresses that NCCL gets, and the copies on the call's stream before and after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Substitutes {
    pub send: Address,
    pub receive: Address,
    pub before: Option<Copy>,
    pub after: Option<Copy>,
}

impl Substitutes {
    /// Whether any buffer is staged.
    pub fn copies(&self) -> bool {
        self.before.is_some() || self.after.is_some()
    }
}

impl Buffers {
    /// Whether this rank's part already lies at its place in the receive buffer.
    pub fn is_in_place(&self) -> bool {
        self.receive.contains(self.send)
    }

    /// The substitutes, from the buffers' aliases where they are registered (in place, only `receive` counts). `room` gives staging memory.
    pub fn substitutes<E>(
        &self,
        send: Option<Address>,
        receive: Option<Address>,
        mut room: impl FnMut(u64) -> Result<Address, E>,
    ) -> Result<Substitutes, E> {
        let offset = self.is_in_place().then(|| self.send.base - self.receive.base);
        let (to, after) = match receive {
            Some(alias) => (alias, None),
            None => {
                let staged = room(self.receive.bytes)?;
                let back = Copy { from: staged, to: self.receive.base, bytes: self.receive.bytes };
                (staged, Some(back))
            }
        };
        let staged = |place| Some(Copy { from: self.send.base, to: place, bytes: self.send.bytes });
        let (from, before) = match (offset, send) {
            (Some(offset), _) if after.is_none() => (to + offset, None),
            (Some(offset), _) => (to + offset, staged(to + offset)),
            (None, Some(alias)) => (alias, None),
            (None, None) => {
                let place = room(self.send.bytes)?;
                (place, staged(place))
            }
        };
        Ok(Substitutes { send: from, receive: to, before, after })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Addresses: the program's at 100 and 200 MiB, aliases 1000 MiB above, staging from 5000 MiB.
    fn run(in_place: bool, sends: bool, receives: bool) -> (Substitutes, u64) {
        let receive = Range { base: 200 * MIB, bytes: 16 * MIB };
        let base = if in_place { receive.base + 4 * MIB } else { 100 * MIB };
        let buffers = Buffers { send: Range { base, bytes: 4 * MIB }, receive };
        let mut taken = 0;
        let room = |bytes: u64| {
            taken += bytes;
            Ok::<_, ()>(5000 * MIB + taken - bytes)
        };
        let alias = |is: bool, base: u64| is.then_some(base + 1000 * MIB);
        let substitutes =
            buffers.substitutes(alias(sends, base), alias(receives, receive.base), room).unwrap();
        (substitutes, taken)
    }

    /// NCCL finds the data of the program's buffer, and the program gets NCCL's result. Nothing is copied
    /// without need.
    #[test]
    fn all_cases() {
        for (in_place, sends, receives) in (0..8).map(|case| (case & 1 != 0, case & 2 != 0, case & 4 != 0)) {
            let (got, taken) = run(in_place, sends, receives);
            let send = if in_place { 204 * MIB } else { 100 * MIB };
            let is_staged = |place: u64| place >= 5000 * MIB;
            assert_eq!(is_staged(got.receive), !receives);
            assert_eq!(got.after.is_some(), !receives);
            if let Some(copy) = got.after {
                assert_eq!((copy.from, copy.to, copy.bytes), (got.receive, 200 * MIB, 16 * MIB));
            }
            if let Some(copy) = got.before {
                assert_eq!((copy.from, copy.to, copy.bytes), (send, got.send, 4 * MIB));
            }
            assert_eq!(got.before.is_some(), is_staged(got.send));
            assert_eq!(got.send == got.receive + 4 * MIB, in_place, "in place stays in place");
            let needed = if receives { 0 } else { 16 * MIB } + if sends || in_place { 0 } else { 4 * MIB };
            assert_eq!(taken, needed);
        }
    }

    #[test]
    fn no_room() {
        let range = Range { base: MIB, bytes: MIB };
        let buffers = Buffers { send: range, receive: Range { base: 9 * MIB, bytes: 4 * MIB } };
        assert_eq!(buffers.substitutes(None, Some(1), |_| Err(5)), Err(5));
        assert_eq!(buffers.substitutes(Some(1), None, |_| Err(5)), Err(5));
    }
}
