//! Tests every collective against a reference, with ranks as threads and as processes.

#![allow(clippy::undocumented_unsafe_blocks, reason = "C calls with the scenario's own buffers, all of them")]

mod support;

use support::*;

const COUNTS: [usize; 4] = [0, 1, 1000, 70_001];

#[test]
#[ignore = "started by the other tests"]
fn child() {
    support::child(&[
        ("collectives", collectives),
        ("types", types),
        ("pre_mul_sum", pre_mul_sum),
        ("graphs", graphs),
    ]);
}

/// All collectives move and reduce the right bytes, in place and not, below and above the size of a round.
#[test]
fn collectives_as_threads() {
    for ranks in [1, 2, 3, 4, 8] {
        expect_success("collectives", Ranks::Threads(ranks));
    }
}

/// The same with ranks as processes.
#[test]
fn collectives_as_processes() {
    for ranks in [2, 3, 4, 8] {
        expect_success("collectives", Ranks::Processes(ranks));
    }
}

/// Sums, products, extremes and averages of every type have NCCL's semantics.
#[test]
fn all_types_and_operators() {
    expect_success("types", Ranks::Threads(3));
    expect_success("types", Ranks::Processes(2));
}

/// Each rank's own factor scales its input before the sum.
#[test]
fn user_operators() {
    expect_success("pre_mul_sum", Ranks::Processes(2));
}

/// A captured collective runs at every replay, between eager ones.
#[test]
fn graph_replays() {
    expect_success("graphs", Ranks::Threads(2));
    expect_success("graphs", Ranks::Processes(3));
}

/// Element `index` of rank `rank`: small, so that sums of f32 are exact.
fn element(rank: usize, index: usize) -> f32 {
    ((index * 7 + rank * 3) % 64) as f32
}

fn collectives(rank: &mut Rank) {
    rank.join();
    let Rank { rank: me, ranks, comm, stream, nccl, .. } = *rank;
    for count in COUNTS {
        let mine: Vec<f32> = (0..count).map(|index| element(me, index)).collect();
        let sum = |index| (0..ranks).map(|peer| element(peer, index)).sum::<f32>();
        let sums: Vec<f32> = (0..count).map(sum).collect();
        let all: Vec<f32> =
            (0..ranks).flat_map(|peer| (0..count).map(move |index| element(peer, index))).collect();
        let wide: Vec<f32> = (0..ranks * count).map(|index| element(me, index)).collect();
        let wide_sums: Vec<f32> = (0..count).map(|index| sum(me * count + index)).collect();
        let root = ranks - 1;

        let (send, receive) = (rank.upload(&mine), rank.upload(&vec![0f32; count]));
        assert_eq!(rank.all_reduce(send, receive, count), SUCCESS);
        assert_eq!(rank.download::<f32>(receive, count), sums, "all-reduce of {count}");

        let code =
            unsafe { (nccl.reduce)(send, receive, count, FLOAT32, AVERAGE, root as i32, comm, stream) };
        assert_eq!(code, SUCCESS);
        let averages = rank.download::<f32>(receive, count);
        if me == root {
            let close = |(value, sum): (&f32, &f32)| (value - sum / ranks as f32).abs() < 1e-4;
            assert!(averages.iter().zip(&sums).all(close), "reduce of {count}");
        }

        let code = unsafe { (nccl.broadcast)(send, receive, count, FLOAT32, root as i32, comm, stream) };
        assert_eq!(code, SUCCESS);
        assert_eq!(rank.download::<f32>(receive, count), all[root * count..], "broadcast of {count}");

        let large = rank.upload(&vec![0f32; ranks * count]);
        assert_eq!(unsafe { (nccl.all_gather)(send, large, count, FLOAT32, comm, stream) }, SUCCESS);
        assert_eq!(rank.download::<f32>(large, ranks * count), all, "all-gather of {count}");

        let in_place = rank.upload(&wide);
        let own = in_place + me * count * 4;
        let code = unsafe { (nccl.reduce_scatter)(in_place, own, count, FLOAT32, SUM, comm, stream) };
        assert_eq!(code, SUCCESS);
        assert_eq!(rank.download::<f32>(own, count), wide_sums, "reduce-scatter of {count} in place");

        let wide_send = rank.upload(&wide);
        assert_eq!(unsafe { (nccl.all_to_all)(wide_send, large, count, FLOAT32, comm, stream) }, SUCCESS);
        let transposed: Vec<f32> = (0..ranks)
            .flat_map(|peer| (0..count).map(move |index| element(peer, me * count + index)))
            .collect();
        assert_eq!(rank.download::<f32>(large, ranks * count), transposed, "all-to-all of {count}");

        let code = unsafe { (nccl.gather)(send, large, count, FLOAT32, root as i32, comm, stream) };
        assert_eq!(code, SUCCESS);
        let gathered = rank.download::<f32>(large, ranks * count);
        assert_eq!(gathered, if me == root { all.clone() } else { transposed.clone() }, "gather of {count}");

        let code = unsafe { (nccl.scatter)(wide_send, receive, count, FLOAT32, root as i32, comm, stream) };
        assert_eq!(code, SUCCESS);
        let piece: Vec<f32> = (0..count).map(|index| element(root, me * count + index)).collect();
        assert_eq!(rank.download::<f32>(receive, count), piece, "scatter of {count}");

        assert_eq!(rank.all_reduce(send, send, count), SUCCESS);
        assert_eq!(rank.download::<f32>(send, count), sums, "all-reduce of {count} in place");
    }
    rank.leave();
}

fn types(rank: &mut Rank) {
    rank.join();
    let Rank { rank: me, ranks, comm, stream, nccl, .. } = *rank;
    // Bytes of one element of every type from int8 to bfloat16, for the values 1 + rank.
    let encode = |datatype: i32, value: usize| -> Vec<u8> {
        match datatype {
            0 | 1 => vec![value as u8],
            2 | 3 => (value as u32).to_le_bytes().to_vec(),
            4 | 5 => (value as u64).to_le_bytes().to_vec(),
            6 => half::f16::from_f32(value as f32).to_le_bytes().to_vec(),
            7 => (value as f32).to_le_bytes().to_vec(),
            8 => (value as f64).to_le_bytes().to_vec(),
            _ => half::bf16::from_f32(value as f32).to_le_bytes().to_vec(),
        }
    };
    let values: Vec<usize> = (0..ranks).map(|peer| 6 * (peer + 1)).collect();
    let expected = [
        values.iter().sum::<usize>(),
        values.iter().product(),
        *values.iter().max().expect("ranks"),
        *values.iter().min().expect("ranks"),
    ];
    for datatype in 0..10 {
        for (operator, expected) in expected.iter().enumerate() {
            let send = rank.upload(&encode(datatype, values[me]));
            let receive = rank.upload(&[0u8; 8]);
            let code =
                unsafe { (nccl.all_reduce)(send, receive, 1, datatype, operator as i32, comm, stream) };
            assert_eq!(code, SUCCESS);
            let wanted = encode(datatype, *expected);
            // Products of 16-bit floats round; sums do not here.
            let exact = operator != 1 || !matches!(datatype, 6 | 9);
            let got = rank.download::<u8>(receive, wanted.len());
            assert!(!exact || got == wanted, "type {datatype} operator {operator}: {got:?}, not {wanted:?}");
        }
    }
    // -7 and -7 (and -7): the sum wraps in the type, the average truncates towards zero.
    let send = rank.upload(&[if me == 0 { -7i32 } else { -6 }]);
    let receive = rank.upload(&[0i32]);
    assert_eq!(unsafe { (nccl.all_reduce)(send, receive, 1, INT32, AVERAGE, comm, stream) }, SUCCESS);
    assert_eq!(rank.download::<i32>(receive, 1), [-6]);
    // 8-bit floats are copied, not reduced.
    assert_eq!(unsafe { (nccl.all_reduce)(send, receive, 1, 10, SUM, comm, stream) }, INVALID_ARGUMENT);
    assert_eq!(unsafe { (nccl.broadcast)(send, receive, 1, 10, 0, comm, stream) }, SUCCESS);
    rank.leave();
}

fn pre_mul_sum(rank: &mut Rank) {
    rank.join();
    let Rank { rank: me, comm, stream, nccl, .. } = *rank;
    let factor = if me == 0 { 10f32 } else { 0.5 };
    let mut operator = 0;
    let bytes = factor.to_le_bytes();
    assert_eq!(unsafe { (nccl.pre_mul_sum)(&mut operator, bytes.as_ptr(), FLOAT32, 1, comm) }, SUCCESS);
    let (send, receive) = (rank.upload(&[3f32, 4.0]), rank.upload(&[0f32; 2]));
    assert_eq!(unsafe { (nccl.all_reduce)(send, receive, 2, FLOAT32, operator, comm, stream) }, SUCCESS);
    // The operator may be destroyed as soon as the call has returned.
    assert_eq!(unsafe { (nccl.operator_destroy)(operator, comm) }, SUCCESS);
    assert_eq!(rank.download::<f32>(receive, 2), [31.5, 42.0]);
    assert_eq!(
        unsafe { (nccl.all_reduce)(send, receive, 2, FLOAT32, operator, comm, stream) },
        INVALID_ARGUMENT
    );
    rank.leave();
}

fn graphs(rank: &mut Rank) {
    rank.join();
    let ranks = rank.ranks as f32;
    let buffer = rank.upload(&[1f32; 100]);
    let graph = rank.cuda.capture(rank.stream, || assert_eq!(rank.all_reduce(buffer, buffer, 100), SUCCESS));
    rank.cuda.launch(graph, rank.stream);
    rank.cuda.launch(graph, rank.stream);
    assert_eq!(rank.all_reduce(buffer, buffer, 100), SUCCESS);
    rank.cuda.launch(graph, rank.stream);
    assert_eq!(rank.download::<f32>(buffer, 100), [ranks.powi(4); 100]);
    rank.leave();
}
