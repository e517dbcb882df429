//! Where this process runs, in terms that hold across containers; and random names.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};
use rustix::system::uname;

use crate::children::digest;
use crate::negotiated::Token;
use windlass_base::process::fork_local::ForkLocal;

use super::facts::Place;

/// The boot id of the kernel and the network namespace. Process ids, host names and machine ids are worse: each container has its own.
/// They stand in for a boot id that a sandbox hides, and 0 for the namespace: whether descriptors pass is the proof.
///
/// `part`: which part of the host, if NCCL_HOSTID divides it.
pub fn here(part: Option<u64>) -> Place {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let of_names = || {
        let names = [uname().nodename().to_bytes(), read("/etc/machine-id").as_bytes()].concat();
        digest(b"windlass host", &names)
    };
    let mut host = boot_id(&read("/proc/sys/kernel/random/boot_id")).unwrap_or_else(of_names);
    let part = part.unwrap_or_default().to_be_bytes();
    host.0.iter_mut().zip(part).for_each(|(byte, part)| *byte ^= part);
    // Not `self`: the main thread may have ended.
    let network = rustix::fs::stat("/proc/thread-self/ns/net").map_or(0, |namespace| namespace.st_ino);
    Place { host, network }
}

fn boot_id(text: &str) -> Option<Token> {
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    Some(Token(number.to_be_bytes()))
}

/// 128 random bits.
pub fn random() -> io::Result<Token> {
    let mut bytes = [0u8; 16];
    let filled = getrandom(&mut bytes, GetRandomFlags::empty())?;
    if filled == bytes.len() { Ok(Token(bytes)) } else { Err(io::Error::other("too few random bytes")) }
}

/// A random name of this process, the same for all its life. A forked child gets another.
pub fn process() -> io::Result<Token> {
    static NAME: ForkLocal<Token> = ForkLocal::new();
    NAME.get_or_try_init(random).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A boot id is read as a number. Other text is none.
    #[test]
    fn boot_ids() {
        let read = boot_id("00000000-0000-0000-0000-0000000001ff\n");
        assert_eq!(read.unwrap().0[14..], [1, 255]);
        assert_eq!(boot_id("1234"), None);
        assert_eq!(boot_id(""), None);
        assert_eq!(here(None), here(None));
        assert_eq!(here(Some(7)), here(Some(7)));
        assert_ne!(here(Some(7)).host, here(None).host);
        assert_ne!(random().unwrap(), random().unwrap());
        assert_eq!(process().unwrap(), process().unwrap());
    }
}
