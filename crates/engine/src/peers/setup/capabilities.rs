//! Decides which features this rank would have beside messages, and what it lacks for each other one.
//!
//! Pure: decided from options, [NCCL's variables](windlass_base::config::nccl), NCCL's release and the device. Ranks tell each other the results as
//! bits of the negotiated config. What one rank lacks, all lack.

use crate::forward::init::Ctas;
use windlass_base::config::nccl::{self, Effect, Settings};
use windlass_base::config::{Collectives, Config, Order, Register};
use windlass_base::gpu::device;
use windlass_base::stats::features::{Feature, Lack, Lacks};

use windlass_bootstrap::negotiated::{GRID_MAX, NegotiatedConfig, capability};
use windlass_transport::native;
use windlass_transport::sequencer::Graphs;
use windlass_transport::tuning::{self, Collective, Limits};

/// Everything that a rank decides from.
#[derive(Clone, Copy, Debug)]
pub(in crate::peers) struct Basis<'a> {
    pub options: &'a Config,
    pub nccl: &'a Settings,
    /// NCCL's version code, 0 if unknown.
    pub version: i32,
    pub device: &'a device::Facts,
    /// What the communicator's configuration says of blocks.
    pub ctas: Ctas,
    pub ranks: u32,
    /// Whether kernels for native collectives load.
    pub has_kernels: bool,
    /// Whether the kernel gives pidfds.
    pub has_pidfds: bool,
}

/// The first NCCL release that finds a window again by a handle on the device.
const WINDOWS_SINCE: i32 = 22803;
/// The first release with which registration was measured to be faster.
const PROFITS_SINCE: i32 = 22800;
/// The first release whose overlapping kernels wait, as read in the sources of 2.28.7 to 2.30.7.
const WAITS_SINCE: i32 = 23007;

/// Whether NCCL's kernels that start early wait for the kernel before them ahead of touching memory. Older kernels over
/// windows did not wait: they relied on earlier kernels that never let them start early.
pub(in crate::peers) fn others_wait() -> bool {
    nccl::version() >= WAITS_SINCE
}

impl Basis<'_> {
    /// The bits that this rank reports.
    pub(in crate::peers) fn capabilities(&self) -> u64 {
        let windows = self.windows().is_ok();
        let bits = [
            // Larger batches were measured with all blocks only.
            (self.ctas_max() >= GRID_MAX, capability::LARGER_BATCHES),
            (self.has_multicast(), capability::MULTICAST),
            (tuning::RINGS_IN_FOURS.contains(&self.version), capability::RINGS_IN_FOURS),
            (self.native().is_ok(), capability::NATIVE),
            (!self.ctas.has_policy, capability::UNBOUND),
            (windows, capability::WINDOWS),
            (self.registration().is_ok(), capability::REGISTERS),
            (self.options.register == Register::On, capability::REGISTERS_ANYWHERE),
            (!self.nccl.has(Effect::LaunchBarrier), capability::LAUNCHES_ALONE),
            (self.has_fixed_order(), capability::FIXED_ORDER),
            (self.has_pidfds, capability::PIDFDS),
        ];
        bits.into_iter().filter(|(has, _)| *has).fold(0, |all, (_, bit)| all | bit)
    }

    /// What this rank lacks, whatever the others have.
    pub(in crate::peers) fn lacks(&self) -> Lacks {
        let policy = if self.ctas.has_policy { Err(Lack::Variable) } else { Ok(()) };
        let of_native = if self.has_fixed_order() { Ok(()) } else { policy };
        let lack = |own: Result<(), Lack>| own.err().unwrap_or_default();
        Lacks::default()
            .with(Feature::Native, lack(self.native().and(of_native)))
            .with(Feature::Windows, lack(self.windows().and(policy)))
            .with(Feature::Registration, lack(self.registration()))
            .with(Feature::Deaths, lack(if self.has_pidfds { Ok(()) } else { Err(Lack::Device) }))
    }

    /// Whether `WINDLASS_ORDER` asks for another order of sums than NCCL's. What was chosen for NCCL's order then does not count.
    fn has_fixed_order(&self) -> bool {
        self.options.order != Order::Auto
    }

    /// Native collectives need kernels that load and the option, and no variable that chooses NCCL's algorithms.
    fn native(&self) -> Result<(), Lack> {
        if self.options.collectives == Collectives::Off {
            Err(Lack::Option)
        } else if self.ranks as usize > native::RANKS_MAX {
            Err(Lack::ManyRanks)
        } else if self.nccl.has(Effect::Algorithms) && !self.has_fixed_order() {
            Err(Lack::Variable)
        } else if !self.has_kernels {
            Err(Lack::Device)
        } else {
            Ok(())
        }
    }

    /// Kept windows need an NCCL without multicast: with it, NCCL binds windows at places that must be equal on all ranks, and makes some
    /// by itself that Windlass does not see. So it does where a policy of blocks asks for that.
    fn windows(&self) -> Result<(), Lack> {
        if self.options.pool_bytes_max == 0 {
            Err(Lack::Option)
        } else if self.nccl.has(Effect::NoCuMem) {
            Err(Lack::NoCuMem)
        } else if self.nccl.has(Effect::NoWindows) || self.nccl.has(Effect::Algorithms) {
            Err(Lack::Variable)
        } else if self.version < WINDOWS_SINCE {
            Err(Lack::Version)
        } else if self.has_multicast() {
            Err(Lack::Multicast)
        } else {
            Ok(())
        }
    }

    /// Registration is for releases that were measured. `WINDLASS_REGISTER=on` allows every release. Whether it pays on
    /// a device is a [limit](windlass_transport::tuning::Collective::RegisteredAllGather).
    fn registration(&self) -> Result<(), Lack> {
        let since = match self.options.register {
            Register::Off => return Err(Lack::Option),
            Register::On => 0,
            Register::Auto => PROFITS_SINCE,
        };
        if self.nccl.has(Effect::NoCuMem) {
            Err(Lack::NoCuMem)
        } else if self.nccl.has(Effect::NoRegistration) {
            Err(Lack::Variable)
        } else if self.version < since {
            Err(Lack::Version)
        } else {
            Ok(())
        }
    }

    /// How the communicator's graphs are ordered among each other.
    pub(in crate::peers) fn graphs(&self) -> Graphs {
        // The variable overrides the configuration, both ways.
        if self.nccl.has(Effect::GraphsUnordered) {
            Graphs::Apart
        } else if self.nccl.has(Effect::GraphsOrdered) {
            Graphs::Mixed
        } else {
            self.ctas.graphs
        }
    }

    /// The largest number of blocks of one kernel.
    pub(in crate::peers) fn ctas_max(&self) -> u32 {
        let limits = [self.ctas.max, self.nccl.ctas_max()];
        limits.into_iter().filter(|limit| *limit > 0).fold(GRID_MAX, u32::min)
    }

    pub(in crate::peers) fn has_multicast(&self) -> bool {
        self.device.multicast && !self.nccl.has(Effect::NoMulticast)
    }
}

/// What a communicator lacks by its negotiated config. This rank's own reason comes first, if it has one.
pub(in crate::peers) fn of_all(negotiated: &NegotiatedConfig, limits: &Limits, own: Lacks) -> Lacks {
    let lack = |feature: Feature, has: bool, otherwise: Lack| match own.of(feature) {
        Lack::NoLink => Lack::NoLink,
        _ if has => Lack::Nothing,
        Lack::Nothing => otherwise,
        own => own,
    };
    let unbuilt = if negotiated.is_lazy() { Lack::Lazy } else { Lack::OtherRank };
    let (native, windows) = (tuning::serves(negotiated), negotiated.keeps_windows());
    let pays = limits.serve(Collective::RegisteredAllGather, 0);
    let registration = if negotiated.registers() && !pays {
        let has_multicast = negotiated.capabilities & capability::MULTICAST != 0;
        if has_multicast { Lack::Multicast } else { Lack::Device }
    } else {
        lack(Feature::Registration, negotiated.registers(), unbuilt)
    };
    Lacks::default()
        .with(Feature::Native, lack(Feature::Native, native, Lack::OtherRank))
        .with(Feature::Windows, lack(Feature::Windows, windows, Lack::OtherRank))
        .with(Feature::Registration, registration)
        .with(Feature::Deaths, lack(Feature::Deaths, negotiated.sees_ends(), Lack::OtherRank))
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use windlass_bootstrap::negotiated::{Token, Version};

    fn hopper() -> device::Facts {
        device::Facts {
            ordinal: 0,
            uuid: [0; 16],
            pci: String::new(),
            capability: 90,
            multiprocessors: 132,
            memory_bytes: 0,
            virtual_memory: true,
            posix_handles: true,
            multicast: false,
            memory_domains: 4,
            threads_per_multiprocessor: 2048,
        }
    }

    fn basis<'a>(options: &'a Config, device: &'a device::Facts) -> Basis<'a> {
        static NOTHING: LazyLock<Settings> = LazyLock::new(Settings::default);
        Basis {
            options,
            nccl: &NOTHING,
            version: 22809,
            device,
            ctas: Ctas::UNSAID,
            ranks: 2,
            has_kernels: true,
            has_pidfds: true,
        }
    }

    fn set(effect: Effect) -> Settings {
        std::iter::once(effect).collect()
    }

    /// Registration is for measured versions and settings. If asked for, it is done with every release.
    #[test]
    fn who_registers() {
        let hopper = hopper();
        let all = |change: &dyn Fn(Basis<'_>) -> bool| {
            [Register::Auto, Register::On, Register::Off].map(|register| {
                let options = Config { register, ..Config::default() };
                change(basis(&options, &hopper))
            })
        };
        let at = |version| all(&|basis| Basis { version, ..basis }.registration().is_ok());
        assert_eq!([at(22800), at(22799)], [[true, true, false], [false, true, false]]);
        let with = |nccl: Settings| all(&|basis| Basis { nccl: &nccl, ..basis }.registration().is_ok());
        assert_eq!(with(set(Effect::NoRegistration)), [false; 3]);
        assert_eq!(with(set(Effect::NoCuMem)), [false; 3]);
    }

    /// Windows are kept where NCCL makes none by itself.
    #[test]
    fn who_keeps_windows() {
        let (options, hopper) = (Config::default(), hopper());
        let switched = device::Facts { multicast: true, ..hopper.clone() };
        let plain = basis(&options, &hopper);
        let of = |basis: Basis<'_>| basis.windows();
        assert_eq!(of(plain), Ok(()));
        assert_eq!(of(Basis { version: 22802, ..plain }), Err(Lack::Version));
        assert_eq!(of(Basis { device: &switched, ..plain }), Err(Lack::Multicast));
        assert_eq!(of(Basis { device: &switched, nccl: &set(Effect::NoMulticast), ..plain }), Ok(()));
        assert_eq!(of(Basis { nccl: &set(Effect::Algorithms), ..plain }), Err(Lack::Variable));
        assert_eq!(of(Basis { nccl: &set(Effect::NoWindows), ..plain }), Err(Lack::Variable));
        assert_eq!(of(Basis { nccl: &set(Effect::NoCuMem), ..plain }), Err(Lack::NoCuMem));
        let poolless = Config { pool_bytes_max: 0, ..Config::default() };
        assert_eq!(of(Basis { options: &poolless, ..plain }), Err(Lack::Option));
    }

    /// Native collectives are for programs that leave the algorithm to NCCL.
    #[test]
    fn who_has_native_collectives() {
        let (options, hopper) = (Config::default(), hopper());
        let plain = basis(&options, &hopper);
        assert_eq!(plain.native(), Ok(()));
        // How NCCL allocates memory does not matter to native collectives.
        assert_eq!(Basis { nccl: &set(Effect::NoCuMem), ..plain }.native(), Ok(()));
        assert_eq!(Basis { nccl: &set(Effect::Algorithms), ..plain }.native(), Err(Lack::Variable));
        assert_eq!(Basis { has_kernels: false, ..plain }.native(), Err(Lack::Device));
        assert_eq!(Basis { ranks: 9, ..plain }.native(), Err(Lack::ManyRanks));
        let off = Config { collectives: Collectives::Off, ..Config::default() };
        assert_eq!(Basis { options: &off, ..plain }.native(), Err(Lack::Option));
    }

    /// In fixed order, variables about NCCL's order do not count. Options about native collectives do.
    #[test]
    fn who_has_fixed_order() {
        let hopper = hopper();
        let own = Ctas { has_policy: true, ..Ctas::UNSAID };
        for (order, has) in [(Order::Auto, false), (Order::Fixed, true), (Order::Strict, true)] {
            let options = Config { order, ..Config::default() };
            let plain = basis(&options, &hopper);
            let chosen = Basis { nccl: &set(Effect::Algorithms), ctas: own, ..plain };
            assert_eq!(plain.capabilities() & capability::FIXED_ORDER != 0, has);
            assert_eq!(chosen.capabilities() & capability::NATIVE != 0, has);
            assert_eq!(chosen.lacks().of(Feature::Native) == Lack::Nothing, has);
            assert_eq!(chosen.lacks().of(Feature::Windows), Lack::Variable);
            let off = Config { collectives: Collectives::Off, ..options.clone() };
            assert_eq!(Basis { options: &off, ..plain }.native(), Err(Lack::Option));
        }
    }

    /// The variable overrides the configuration, both ways.
    #[test]
    fn who_mixes_graphs() {
        let (options, hopper) = (Config::default(), hopper());
        let plain = basis(&options, &hopper);
        let apart = Basis { ctas: Ctas { graphs: Graphs::Apart, ..Ctas::UNSAID }, ..plain };
        assert_eq!((plain.graphs(), apart.graphs()), (Graphs::Mixed, Graphs::Apart));
        assert_eq!(Basis { nccl: &set(Effect::GraphsUnordered), ..plain }.graphs(), Graphs::Apart);
        assert_eq!(Basis { nccl: &set(Effect::GraphsOrdered), ..apart }.graphs(), Graphs::Mixed);
    }

    /// The least limit on blocks holds, and larger batches are for communicators without a limit.
    #[test]
    fn limits_on_blocks() {
        let (options, hopper) = (Config::default(), hopper());
        let plain = basis(&options, &hopper);
        let limited = Basis { ctas: Ctas { max: 12, ..Ctas::UNSAID }, ..plain };
        assert_eq!((plain.ctas_max(), limited.ctas_max()), (GRID_MAX, 12));
        assert_eq!(Basis { nccl: &set(Effect::MaxCtas(9)), ..limited }.ctas_max(), 9);
        let larger = |basis: Basis<'_>| basis.capabilities() & capability::LARGER_BATCHES != 0;
        assert!(larger(plain) && !larger(limited));
    }

    /// A feature that all ranks have is not lacking. One that only this rank has is lacking on another rank.
    #[test]
    fn whose_lack() {
        let (options, hopper) = (Config::default(), hopper());
        let nccl = set(Effect::NoCuMem);
        let basis = Basis { nccl: &nccl, ..basis(&options, &hopper) };
        assert_eq!(basis.capabilities() & (capability::NATIVE | capability::WINDOWS), capability::NATIVE);
        let of = |capabilities| {
            let negotiated = NegotiatedConfig {
                comm: Token([0; 16]),
                version: Version::THIS,
                host: Token([0; 16]),
                capabilities,
                options: 0,
                ctas_max: 0,
                members: Vec::new(),
            };
            let lacks = of_all(&negotiated, &Limits::NONE, basis.lacks());
            Feature::ALL.map(|feature| lacks.of(feature))
        };
        assert_eq!(of(0), [Lack::OtherRank, Lack::NoCuMem, Lack::NoCuMem, Lack::OtherRank]);
        assert_eq!(of(basis.capabilities()), [Lack::Nothing, Lack::NoCuMem, Lack::NoCuMem, Lack::Nothing]);
        let blind = Basis { has_pidfds: false, ..basis };
        assert_eq!(blind.lacks().of(Feature::Deaths), Lack::Device);
        assert_eq!(blind.capabilities() & capability::PIDFDS, 0);
    }
}
