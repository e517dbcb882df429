//! What Windlass adds to a call: each function of the null library direct and through Windlass, in one run.

// criterion's macro makes a public function.
#![allow(missing_docs)]

mod support;

use criterion::{Criterion, criterion_group, criterion_main};
use support::Functions;

type Call = fn(&Functions);

fn overhead(criterion: &mut Criterion) {
    let (direct, through) = Functions::both();
    let calls: [(&str, Call); 4] = [
        ("ncclGetVersion (passed on)", Functions::call_version),
        ("ncclCommCount (of a lazy communicator or NCCL's)", Functions::call_count),
        ("ncclAllReduce (seen and counted)", Functions::call_all_reduce),
        ("ncclGroupStart + ncclGroupEnd", Functions::call_group),
    ];
    for (name, call) in calls {
        let mut group = criterion.benchmark_group(name);
        group.bench_function("direct", |bencher| bencher.iter(|| call(&direct)));
        group.bench_function("through Windlass", |bencher| bencher.iter(|| call(&through)));
        group.finish();
    }
}

criterion_group!(benches, overhead);
criterion_main!(benches);
