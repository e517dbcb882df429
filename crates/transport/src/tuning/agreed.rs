//! Decides which limits hold for a communicator, from what its ranks bring and what is [built in](super::built_in). Pure.
//!
//! Each rank brings the cells that its file (`WINDLASS_TUNING`) and its [cache](super::cache) have for the communicator. All ranks read what
//! all have brought in the negotiated config, so they decide alike:
//!
//! - A cell of a file counts before one of a cache.
//! - Ranks that bring nothing take what the others bring. Caches count only where all ranks have [like](Circumstances::unlike) circumstances;
//!   otherwise [`Decided::unlike`] names the line in which they differ.
//! - Where two ranks bring different limits of one cell, the built-in one holds, and [`Decided::unlike`] names both.

use windlass_base::stats::limits::GUESSED;
pub use windlass_base::stats::limits::Source;

use super::cache::Circumstances;
use super::file::{Key, Multicast, NATIVE_BYTES_MAX, Table};
use super::{COLLECTIVES, Collective, Limits, built_in, most_of_few_blocks, serves};
use windlass_bootstrap::negotiated::bytes::{Reader, Writer};
use windlass_bootstrap::negotiated::{Device, Member, NegotiatedConfig, capability};

/// A limit that a rank brings: the largest size in bytes. None: native collectives serve no size.
type Limit = Option<u64>;

/// The most bytes of a rank's circumstances.
const LINES_BYTES_MAX: usize = 768;

/// The limits that one rank brings for one communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Brought {
    multicast: Multicast,
    /// The rank's circumstances, shortened; no line if it does not know them.
    circumstances: Circumstances,
    cells: [Option<(Source, Limit)>; COLLECTIVES],
}

impl Brought {
    /// Takes a rank's cells from its file, else from its cache if the rank knows its circumstances.
    pub fn of(
        ranks: usize,
        device: &Device,
        multicast: Multicast,
        file: &Table,
        cache: Option<(&Circumstances, &Table)>,
    ) -> Brought {
        let Device { capability, multiprocessors, .. } = *device;
        let cells = Collective::ALL.map(|collective| {
            let key = Key { collective, ranks, capability, multiprocessors, multicast };
            let of = |source, table: &Table| Some((source, table.get(&key)?));
            of(Source::File, file).or_else(|| of(Source::Cache, cache?.1))
        });
        let circumstances = cache.map(|(circumstances, _)| circumstances.shortened()).unwrap_or_default();
        Brought { multicast, circumstances, cells }
    }

    /// Encodes it for the rank's report.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        let lines = self.circumstances.lines().join("\n");
        writer.u8((self.multicast == Multicast::Yes).into()).counted(lines.as_bytes(), LINES_BYTES_MAX);
        for (index, cell) in (0..).zip(&self.cells) {
            if let Some((source, limit)) = cell {
                writer.u8(index).u8(*source as u8).u64(limit.map_or(0, |bytes| bytes.saturating_add(1)));
            }
        }
        writer.finish()
    }

    /// Decodes what a rank has reported; none if it cannot be read.
    fn decode(bytes: &[u8]) -> Option<Brought> {
        let mut reader = Reader::new(bytes);
        let multicast = if reader.u8()? == 0 { Multicast::No } else { Multicast::Yes };
        let lines = std::str::from_utf8(reader.counted(LINES_BYTES_MAX)?).ok()?;
        let circumstances = Circumstances::of_lines(lines.lines().map(str::to_owned).collect());
        let mut brought = Brought { multicast, circumstances, cells: [None; COLLECTIVES] };
        while let Some(index) = reader.u8() {
            let source = match reader.u8()? {
                code if code == Source::File as u8 => Source::File,
                code if code == Source::Cache as u8 => Source::Cache,
                _ => return None,
            };
            let limit = reader.u64()?.checked_sub(1).map(|bytes| bytes.min(NATIVE_BYTES_MAX));
            *brought.cells.get_mut(usize::from(index))? = Some((source, limit));
        }
        Some(brought)
    }
}

/// The limits that hold for a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decided {
    /// Up to which size each collective is native.
    pub limits: Limits,
    /// Where each limit comes from.
    pub sources: [Source; COLLECTIVES],
    /// In what ranks differ, so that limits do not count: a line for circumstances, and one for each cell.
    pub unlike: Vec<String>,
}

impl Decided {
    /// The sources of all limits that are not 0, as bits, and [`GUESSED`].
    pub fn source_bits(&self) -> u32 {
        let of = |index: usize| Some(self.sources[index]).filter(|_| self.limits.0[index] > 0);
        let is_guess = of(Collective::AllReduce as usize).is_some_and(|source| source < Source::BuiltIn);
        let first = if is_guess { GUESSED } else { 0 };
        (0..COLLECTIVES).filter_map(of).fold(first, |bits, source| bits | source.bit())
    }
}

/// Decides the limits, the same on every rank.
pub fn decide(negotiated: &NegotiatedConfig) -> Decided {
    let mut ranks = brought(negotiated);
    let mut unlike: Vec<String> = without_caches(&mut ranks).into_iter().collect();
    if !are_alike(negotiated, &ranks) {
        ranks.clear();
    }
    let built_in = built_in::limits(negotiated);
    let taken = Collective::ALL.map(|collective| {
        let taken = taken(&ranks, collective).unwrap_or_else(|words| {
            unlike.push(words);
            None
        });
        // If all ranks ask for registration everywhere, only a file can end it, no measurement in a cache.
        let is_asked_for = collective == Collective::RegisteredAllGather
            && negotiated.capabilities & capability::REGISTERS_ANYWHERE != 0;
        taken.filter(|(source, _)| !is_asked_for || *source == Source::File)
    });
    let decided = Collective::ALL.map(|collective| {
        let (own, source) = built_in[collective as usize];
        // Older tables say nothing of uneven collectives, whose limits were never above those of even ones.
        let of_even = || {
            let (source, even) = taken[collective.even()? as usize]?;
            Some((source, own.min(even)))
        };
        taken[collective as usize].or_else(of_even).unwrap_or((source, own))
    });
    let most = most_of_few_blocks(negotiated.ctas_max());
    let is_served = serves(negotiated);
    let limits = Collective::ALL.map(|collective| {
        if !is_served && collective != Collective::RegisteredAllGather {
            return 0;
        }
        let most = if collective == Collective::RegisteredAllGather { u64::MAX } else { most };
        decided[collective as usize].1.map_or(0, |bytes| bytes.min(most).saturating_add(1))
    });
    Decided { limits: Limits(limits), sources: decided.map(|(source, _)| source), unlike }
}

/// What each rank brings, by rank. Empty if that of one cannot be read.
fn brought(negotiated: &NegotiatedConfig) -> Vec<(u32, Brought)> {
    let all = negotiated.members.iter().map(|member| Some((member.rank, Brought::decode(&member.cells)?)));
    all.collect::<Option<_>>().unwrap_or_default()
}

/// Whether all GPUs are of one kind, and no rank says otherwise of multicast than the negotiated config.
fn are_alike(negotiated: &NegotiatedConfig, ranks: &[(u32, Brought)]) -> bool {
    let is_multicast = negotiated.capabilities & capability::MULTICAST != 0;
    let mut kinds =
        negotiated.members.iter().map(|Member { device, .. }| (device.capability, device.multiprocessors));
    let first = kinds.next();
    kinds.all(|kind| Some(kind) == first)
        && ranks.iter().all(|(_, brought)| (brought.multicast == Multicast::Yes) == is_multicast)
}

/// Takes away what ranks bring of caches, if there is such and two ranks have unlike circumstances: these, in words.
fn without_caches(ranks: &mut [(u32, Brought)]) -> Option<String> {
    let pairs =
        ranks.iter().enumerate().flat_map(|(at, one)| ranks[at + 1..].iter().map(move |other| (one, other)));
    let words = pairs.into_iter().find_map(|((first, one), (second, other))| {
        let (own, others) = one.circumstances.unlike(&other.circumstances)?;
        Some(format!("circumstances: rank {first} has {own}, rank {second} has {others}; limits measured on this machine do not hold"))
    })?;
    let cells = ranks.iter_mut().flat_map(|(_, brought)| &mut brought.cells);
    let mut of_caches = cells.filter(|cell| matches!(cell, Some((Source::Cache, _)))).peekable();
    of_caches.peek()?;
    of_caches.for_each(|cell| *cell = None);
    Some(words)
}

/// The limit that ranks bring for a cell, if any does. If they bring different ones, the error names both.
fn taken(ranks: &[(u32, Brought)], collective: Collective) -> Result<Option<(Source, Limit)>, String> {
    let of = |brought: &Brought| brought.cells[collective as usize];
    let Some(source) = ranks.iter().filter_map(|(_, brought)| Some(of(brought)?.0)).max() else {
        return Ok(None);
    };
    let same = ranks.iter().filter_map(|(rank, brought)| Some((*rank, of(brought)?)));
    let mut same = same.filter(|(_, (own, _))| *own == source);
    let Some((first, (_, limit))) = same.next() else { return Ok(None) };
    match same.find(|(_, (_, own))| *own != limit) {
        None => Ok(Some((source, limit))),
        Some((other, (_, unlike))) => Err(format!(
            "limits of {}: rank {first} has {}, rank {other} has {} ({}); the built-in limit holds",
            collective.name(),
            super::file::limit_text(limit),
            super::file::limit_text(unlike),
            source.name()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::file::HEAD;
    use super::super::tests::negotiated;
    use super::super::{NEEDED, UNMEASURED_BYTES_MAX};
    use super::*;

    const DEVICE: (u16, u16) = (90, 132);

    fn table(lines: &[&str]) -> Table {
        Table::parse(&format!("{HEAD}\n{}\n", lines.join("\n"))).unwrap()
    }

    fn line(collective: &str, limit: &str) -> String {
        format!("{collective} ranks 2 gpu 9.0/132 multicast no native_bytes_max {limit}")
    }

    fn circumstances(power: u32) -> Circumstances {
        Circumstances::new([("watts", power.to_string())])
    }

    /// Two ranks, each with its file and its cache.
    fn with(base: &NegotiatedConfig, ranks: [(&Table, Option<(&Circumstances, &Table)>); 2]) -> Decided {
        let mut negotiated = base.clone();
        for (member, (file, cache)) in negotiated.members.iter_mut().zip(ranks) {
            member.cells = Brought::of(2, &member.device, Multicast::No, file, cache).encode();
        }
        decide(&negotiated)
    }

    fn pair() -> NegotiatedConfig {
        negotiated(2, NEEDED, DEVICE.0, DEVICE.1)
    }

    /// A cell of a file holds for all, also where one rank alone has the file: up, down, or none.
    #[test]
    fn files() {
        let (all_reduce, reduce) = (line("all_reduce", "1G"), line("reduce", "none"));
        let other = "all_gather ranks 2 gpu 8.0/108 multicast yes native_bytes_max 1M";
        let (file, nothing) = (table(&[&all_reduce, &reduce, other]), Table::default());
        let built_in = decide(&pair());
        assert!(built_in.sources[..7].iter().all(|source| *source == Source::BuiltIn));
        for ranks in
            [[(&file, None); 2], [(&file, None), (&nothing, None)], [(&nothing, None), (&file, None)]]
        {
            let decided = with(&pair(), ranks);
            assert_eq!(decided.limits.0[0], (1 << 30) + 1);
            assert_eq!(decided.limits.0[Collective::Reduce as usize], 0);
            assert_eq!(decided.sources[0], Source::File);
            assert_eq!(decided.limits.0[3], built_in.limits.0[3]);
            assert_eq!(decided.unlike, Vec::<String>::new());
        }
    }

    /// Different limits of one cell leave the built-in one, and are named; other cells hold.
    #[test]
    fn unlike() {
        let (one, reduce) = (line("all_reduce", "1M"), line("reduce", "2M"));
        let two = line("all_reduce", "none");
        let (first, second) = (table(&[&one, &reduce]), table(&[&two, &reduce]));
        let decided = with(&pair(), [(&first, None), (&second, None)]);
        assert_eq!((decided.limits.0[0], decided.sources[0]), ((256 << 20) + 1, Source::BuiltIn));
        assert_eq!(decided.limits.0[2], (2 << 20) + 1);
        let expected =
            "limits of all_reduce: rank 0 has 1M, rank 1 has none (file); the built-in limit holds";
        assert_eq!(decided.unlike, [expected]);
    }

    /// A cache counts where all ranks have its circumstances, whoever has the cells; a file counts before it.
    #[test]
    fn caches() {
        let (nothing, cells) = (Table::default(), table(&[&line("all_reduce", "1M"), &line("reduce", "1M")]));
        let (here, there) = (circumstances(700), circumstances(500));
        let of = |first: (&Circumstances, &Table), second: (&Circumstances, &Table)| {
            with(&pair(), [(&nothing, Some(first)), (&nothing, Some(second))])
        };
        for ranks in [[&cells, &nothing], [&nothing, &cells], [&cells, &cells]] {
            let decided = of((&here, ranks[0]), (&here, ranks[1]));
            assert_eq!((decided.limits.0[0], decided.sources[0]), ((1 << 20) + 1, Source::Cache));
        }
        // One GPU has another power limit, or its rank could not ask: that rank finds no cache, and takes what the other has.
        for near in [circumstances(690), Circumstances::new([("watts", "unknown".to_owned())])] {
            for decided in [of((&here, &cells), (&near, &nothing)), of((&near, &nothing), (&here, &cells))] {
                assert_eq!((decided.sources[0], decided.unlike), (Source::Cache, Vec::new()));
            }
        }
        let left_out = |decided: Decided, ranks: &str| {
            let words = format!("circumstances: {ranks}; limits measured on this machine do not hold");
            assert_eq!((decided.sources[0], decided.unlike), (Source::BuiltIn, vec![words]));
        };
        left_out(of((&here, &cells), (&there, &cells)), "rank 0 has watts 700, rank 1 has watts 500");
        left_out(
            with(&pair(), [(&nothing, Some((&here, &cells))), (&nothing, None)]),
            "rank 0 has watts 700, rank 1 has nothing",
        );
        // Nothing is left out where nothing was measured.
        assert_eq!(of((&here, &nothing), (&there, &nothing)).unlike, Vec::<String>::new());
        let file = table(&[&line("all_reduce", "2M")]);
        let both = with(&pair(), [(&nothing, Some((&here, &cells))), (&file, Some((&here, &cells)))]);
        assert_eq!(both.limits.0[0], (2 << 20) + 1);
        assert_eq!([both.sources[0], both.sources[2]], [Source::File, Source::Cache]);
    }

    /// Registration that all ranks ask for is not ended by a measurement.
    #[test]
    fn registration() {
        let nothing = Table::default();
        let cells = table(&[&line("registered_all_gather", "none")]);
        let here = circumstances(700);
        let of = |bits| {
            let base = negotiated(2, NEEDED | bits, DEVICE.0, DEVICE.1);
            let rank = (&nothing, Some((&here, &cells)));
            with(&base, [rank, rank]).limits.0[Collective::RegisteredAllGather as usize]
        };
        assert_eq!(of(0), 0);
        assert!(of(capability::REGISTERS_ANYWHERE) > 1 << 30);
    }

    /// Nothing that is brought counts if GPUs or multicast differ, or if a rank's report cannot be read.
    #[test]
    fn unreadable() {
        let file = table(&[&line("all_reduce", "1M")]);
        let built_in = decide(&pair());
        let mut mixed = pair();
        mixed.members[1].device.multiprocessors = 114;
        assert_eq!(with(&mixed, [(&file, None); 2]).limits, built_in.limits);
        let multicast = negotiated(2, NEEDED | capability::MULTICAST, 90, 132);
        assert_eq!(with(&multicast, [(&file, None); 2]).limits.0[0], UNMEASURED_BYTES_MAX + 1);
        let mut broken = pair();
        let brought = Brought::of(2, &broken.members[0].device, Multicast::No, &file, None);
        broken.members[0].cells = brought.encode();
        assert_eq!(decide(&broken).limits, built_in.limits);
        broken.members[1].cells = vec![0; 12];
        assert_eq!(decide(&broken).limits, built_in.limits);
        assert_eq!(Brought::decode(&brought.encode()), Some(brought));
    }

    /// A limit on blocks lowers the limits. A communicator that native collectives do not serve has none.
    #[test]
    fn blocks() {
        let of = |ctas_max, ranks| {
            let limited = NegotiatedConfig { ctas_max, ..negotiated(ranks, NEEDED, 90, 132) };
            decide(&limited).limits.0[0] - 1
        };
        assert_eq!([1, 8, 23, 24].map(|ctas| of(ctas, 2) >> 10), [64, 512, 1472, 256 << 10]);
        assert_eq!(of(1, 3), 64 << 10);
        for without in [negotiated(9, NEEDED, 90, 132), negotiated(4, capability::NATIVE, 90, 132)] {
            let Limits([native @ .., _]) = decide(&without).limits;
            assert_eq!(native, [0; COLLECTIVES - 1]);
        }
    }

    /// Uneven collectives have the limit that a table gives them; without one, none above that of even ones.
    #[test]
    fn uneven() {
        let limit_with = |lines: &[(&str, &str)]| {
            let lines: Vec<String> = lines.iter().map(|(name, most)| line(name, most)).collect();
            let file = table(&lines.iter().map(String::as_str).collect::<Vec<_>>());
            with(&pair(), [(&file, None); 2]).limits.0[Collective::UnevenReduceScatter as usize]
        };
        assert_eq!(limit_with(&[("uneven_reduce_scatter", "1G")]), (1 << 30) + 1);
        let both = [("reduce_scatter", "1M"), ("uneven_reduce_scatter", "2M")];
        assert_eq!(limit_with(&both), (2 << 20) + 1);
        assert_eq!(limit_with(&[("reduce_scatter", "1M")]), (1 << 20) + 1);
        assert_eq!(limit_with(&[("reduce_scatter", "none")]), 0);
        assert_eq!(limit_with(&[("reduce_scatter", "1G")]), (8 << 20) + 1);
        assert_eq!(limit_with(&[("all_gather", "none")]), (8 << 20) + 1);
    }
}
