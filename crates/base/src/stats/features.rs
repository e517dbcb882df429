//! The features that a peer group may have beside messages, and why it lacks them: as a number in the counters, and in words for
//! readers.

use std::collections::BTreeMap;

/// A feature that a peer group may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Collectives by kernels of Windlass.
    Native,
    /// Windows that stay when they are deregistered.
    Windows,
    /// Buffers that Windlass registers with NCCL.
    Registration,
    /// Ends of peers' processes are seen.
    Deaths,
}

/// Why a peer group lacks a feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lack {
    /// The peer group has the feature.
    #[default]
    Nothing,
    /// An option of Windlass switches it off.
    Option,
    /// A variable of NCCL's switches it off.
    Variable,
    /// NCCL_CUMEM_ENABLE=0.
    NoCuMem,
    /// NCCL is too old.
    Version,
    /// NCCL uses multicast.
    Multicast,
    /// The feature has no kernels, or was not measured, on this kind of GPU.
    Device,
    /// The communicator has too many ranks.
    ManyRanks,
    /// NCCL's part of the communicator is lazy.
    Lazy,
    /// Another rank lacks it.
    OtherRank,
    /// No NVLink joins the ranks' GPUs: NCCL runs all calls between them.
    NoLink,
    /// Calls of this rank do not wait.
    NonBlocking,
}

/// Why one communicator lacks features: one byte for each feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lacks(pub u32);

impl Feature {
    /// All of them.
    pub const ALL: [Feature; 4] = [Feature::Native, Feature::Windows, Feature::Registration, Feature::Deaths];

    /// The feature's name for readers.
    pub fn name(self) -> &'static str {
        match self {
            Feature::Native => "native collectives",
            Feature::Windows => "kept windows",
            Feature::Registration => "registration",
            Feature::Deaths => "notice of dead ranks",
        }
    }

    /// Why the feature is missing, and what would change that.
    fn why(self, lack: Lack) -> &'static str {
        use Feature::{Deaths, Native, Registration, Windows};
        match (self, lack) {
            (_, Lack::Nothing) => "",
            (Native, Lack::Option) => "WINDLASS_COLLECTIVES=off",
            (Native, Lack::Variable) => "NCCL_ALGO, NCCL_PROTO or a CTA policy is set",
            (Native, Lack::Device) => "no kernels load on this GPU",
            (Native, Lack::ManyRanks) => "they are for at most 8 ranks",
            (Windows, Lack::Option) => "WINDLASS_POOL is off",
            (Windows, Lack::Variable) => "NCCL_ALGO, NCCL_PROTO, a CTA policy or NCCL_WIN_ENABLE=0 is set",
            (Windows, Lack::Version) => "they need NCCL 2.28.3",
            (Registration, Lack::Option) => "WINDLASS_REGISTER=off",
            (Registration, Lack::Variable) => "NCCL_LOCAL_REGISTER=0 or NCCL_P2P_USE_CUDA_MEMCPY is set",
            (Registration, Lack::Version) => "it needs NCCL 2.28, or WINDLASS_REGISTER=on",
            (Registration, Lack::Device) => "not measured on this GPU (WINDLASS_REGISTER=on has it)",
            (Registration, Lack::Multicast) => {
                "NCCL uses multicast (WINDLASS_REGISTER=on has it all the same)"
            }
            (_, Lack::OtherRank) => "another rank has none",
            (_, Lack::NoLink) => NO_LINK,
            (_, Lack::NonBlocking) => "its calls do not wait (blocking = 0)",
            (Deaths, Lack::Device) => "pidfd_open fails (it needs Linux 5.3, and seccomp to allow it)",
            (Deaths, _) | (_, Lack::Device | Lack::ManyRanks | Lack::Version) => "not for this communicator",
            (_, Lack::NoCuMem) => "NCCL_CUMEM_ENABLE=0 is set",
            (_, Lack::Multicast) => "NCCL uses multicast (NCCL_NVLS_ENABLE=0 ends that)",
            (_, Lack::Lazy) => "its NCCL communicator is lazy (WINDLASS_LAZY=off builds it at once)",
        }
    }
}

impl Lacks {
    /// Adds why `feature` is missing.
    #[must_use]
    pub fn with(self, feature: Feature, lack: Lack) -> Lacks {
        Lacks(self.0 | (lack as u32) << (8 * feature as u32))
    }

    /// Why `feature` is missing.
    pub fn of(self, feature: Feature) -> Lack {
        use Lack::{
            Device, Lazy, ManyRanks, Multicast, NoCuMem, NoLink, NonBlocking, Nothing, Option, OtherRank,
            Variable, Version,
        };
        let all = [
            Nothing,
            Option,
            Variable,
            NoCuMem,
            Version,
            Multicast,
            Device,
            ManyRanks,
            Lazy,
            OtherRank,
            NoLink,
            NonBlocking,
        ];
        let number = self.0 >> (8 * feature as u32) & 0xff;
        all.get(number as usize).copied().unwrap_or(OtherRank)
    }

    /// The same where no NVLink joins the ranks' GPUs: all that moves bytes is missing.
    #[must_use]
    pub fn without_link(self) -> Lacks {
        let missing = [Feature::Native, Feature::Windows, Feature::Registration];
        let deaths = Lacks::default().with(Feature::Deaths, self.of(Feature::Deaths));
        missing.into_iter().fold(deaths, |lacks, feature| lacks.with(feature, Lack::NoLink))
    }

    /// The same where calls of this rank do not wait.
    #[must_use]
    pub fn without_waits(self) -> Lacks {
        let missing = [Feature::Windows, Feature::Registration].into_iter();
        missing
            .filter(|feature| self.of(*feature) == Lack::Nothing)
            .fold(self, |lacks, feature| lacks.with(feature, Lack::NonBlocking))
    }

    /// Whether no NVLink joins the ranks' GPUs.
    pub fn is_without_link(self) -> bool {
        self.of(Feature::Native) == Lack::NoLink
    }

    /// The reasons in words, by the features' names. Only missing features are in it.
    pub fn words(self) -> BTreeMap<String, String> {
        let lacking = Feature::ALL.into_iter().filter(|feature| self.of(*feature) != Lack::Nothing);
        lacking.map(|feature| (feature.name().into(), feature.why(self.of(feature)).into())).collect()
    }
}

const NO_LINK: &str = "no NVLink joins its GPUs";

/// One line: the features that there are, with the sources of limits, then the missing ones and why. That deaths are seen is not said, as
/// nobody asks for that.
pub fn line(lacks: &BTreeMap<String, String>, limits_from: &[String]) -> String {
    let has = |feature: &Feature| {
        let limits = if *feature == Feature::Native && !limits_from.is_empty() {
            format!(" (limits from: {})", limits_from.join(", "))
        } else {
            String::new()
        };
        format!("{}{limits}", feature.name())
    };
    let is_had = |feature: &&Feature| **feature != Feature::Deaths && !lacks.contains_key(feature.name());
    let features = Feature::ALL.iter().filter(is_had).map(has);
    let is_without_link = lacks.get(Feature::Native.name()).is_some_and(|why| why == NO_LINK);
    let first = if is_without_link { "made by NCCL when a call needs it" } else { "send/recv" };
    let has: Vec<String> = std::iter::once(first.to_owned()).chain(features).collect();
    let without = lacks.iter().map(|(name, why)| format!("; no {name}: {why}"));
    has.join(", ") + &without.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If another rank lacks a feature, the words are the same for every feature.
    #[test]
    fn lacks_of_others() {
        for feature in Feature::ALL {
            let words = Lacks::default().with(feature, Lack::OtherRank).words();
            assert_eq!(words[feature.name()], "another rank has none");
        }
    }

    /// Reasons that are written read back, and each is told in words.
    #[test]
    fn lines() {
        assert_eq!(
            line(&Lacks::default().words(), &[]),
            "send/recv, native collectives, kept windows, registration"
        );
        let lacks = Lacks::default()
            .with(Feature::Native, Lack::Variable)
            .with(Feature::Registration, Lack::Device)
            .with(Feature::Deaths, Lack::Device);
        assert_eq!((lacks.of(Feature::Native), lacks.of(Feature::Windows)), (Lack::Variable, Lack::Nothing));
        let apart = lacks.without_link();
        assert!(apart.is_without_link() && !lacks.is_without_link());
        assert_eq!(apart.of(Feature::Deaths), Lack::Device);
        let why = "no NVLink joins its GPUs";
        assert!(line(&apart.words(), &[]).starts_with("made by NCCL when a call needs it; no kept windows"));
        assert!(line(&apart.words(), &[]).ends_with(&format!("no registration: {why}")));
        assert_eq!(
            line(&lacks.words(), &[]),
            "send/recv, kept windows; no native collectives: NCCL_ALGO, NCCL_PROTO or a CTA policy is set; \
             no notice of dead ranks: pidfd_open fails (it needs Linux 5.3, and seccomp to allow it); \
             no registration: not measured on this GPU (WINDLASS_REGISTER=on has it)"
        );
    }
}
