//! Requests end to end.

use super::*;

#[test]
fn written_data_is_read_back_and_on_the_disk() {
    let (mut guest, file) = Guest::new();
    let data = pattern(8192, 1);
    guest.put(DATA, &data);
    // In segments that are no whole blocks.
    let out = [(DATA, 1000, 0), (DATA + 1000, 3096, 0), (DATA + 4096, 4096, 0)];
    let ended = guest.run(at(0, 0), &write10(100, 16), &out);
    assert!(ended.good() && ended.residual == 0, "{ended:?}");
    assert_eq!(ended.used, RESPONSE);
    assert_eq!(content(&file, 51_200, 8192), data);
    let back = [(DATA + 0x10_0000, 5000, WRITE), (DATA + 0x20_0000, 4000, WRITE)];
    let ended = guest.run(at(0, 0), &read10(100, 16), &back);
    assert!(ended.good(), "{ended:?}");
    // The data is shorter than the buffer.
    assert_eq!((ended.residual, ended.used), (808, RESPONSE + 8192));
    assert_eq!(guest.get(DATA + 0x10_0000, 5000), data[..5000]);
    assert_eq!(guest.get(DATA + 0x20_0000, 3192), data[5000..]);
    // The dirty bitmap agrees.
    assert!(guest.run(at(0, 0), &SYNCHRONIZE_CACHE, &[]).good());
}

#[test]
fn reads_mark_the_dirty_bitmap() {
    use vm_memory::bitmap::Bitmap;
    use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
    let (mut guest, _file) = Guest::new();
    let mem = guest.mem.memory().into_inner();
    let region = mem.find_region(GuestAddress(0)).unwrap();
    let data = DATA as usize + 0x8000;
    assert!(!region.bitmap().dirty_at(data));
    let ended = guest.run(at(0, 0), &read10(0, 8), &[(data as u64, 4096, WRITE)]);
    assert!(ended.good());
    assert!(region.bitmap().dirty_at(data) && !region.bitmap().dirty_at(data + 4096));
}

#[test]
fn both_queues_and_indirect_descriptors_are_served() {
    let (mut guest, file) = Guest::new();
    file.write_all_at(&pattern(512, 7), 512).unwrap();
    let (header, response) = guest.frame(field(at(0, 0)), 1, 0, &read10(1, 1));
    guest.request[1].add_indirect(RESPONSES - 0x1000, &[header, response, (DATA, 512, WRITE)]);
    guest.request[1].kick();
    let (_, used) = guest.request[1].wait();
    assert!(guest.ended(response.0, used).good());
    assert_eq!(guest.get(DATA, 512), pattern(512, 7));
}

#[test]
fn header_and_response_may_share_descriptors_with_data() {
    let (mut guest, file) = Guest::new();
    let (header, response) = guest.frame(field(at(0, 0)), 1, 0, &write10(3, 1));
    // Header and data in one descriptor, the end of the header in another; the response in three.
    let bytes = guest.get(header.0, 51);
    guest.put(DATA, &bytes[..20]);
    guest.put(DATA + 0x1000, &[&bytes[20..], &pattern(512, 9)[..]].concat());
    let chain = [
        (DATA, 20, 0),
        (DATA + 0x1000, 31 + 512, 0),
        (response.0, 1, WRITE),
        (response.0 + 1, 100, WRITE),
        (response.0 + 101, 7, WRITE),
    ];
    guest.request[0].add(&chain);
    guest.request[0].kick();
    let (_, used) = guest.request[0].wait();
    let ended = guest.ended(response.0, used);
    assert!(ended.good() && ended.used == RESPONSE, "{ended:?}");
    assert_eq!(content(&file, 3 * 512, 512), pattern(512, 9));
}

#[test]
fn more_queries_of_extents_than_threads_are_answered() {
    let (mut guest, file) = Guest::new();
    file.write_all_at(&pattern(4096, 3), 64 * 512).unwrap();
    // GET LBA STATUS (16) of block 64.
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 24, 0, 0];
    let queries: Vec<_> = (0..40_u64)
        .map(|number| {
            let at_data = DATA + number * 4096;
            let (header, response) = guest.frame(field(at(0, 0)), number, 0, &cdb);
            guest.request[0].add(&[header, response, (at_data, 24, WRITE)]);
            (at_data, response.0)
        })
        .collect();
    guest.request[0].kick();
    let used: Vec<u32> = queries.iter().map(|_| guest.request[0].wait().1).collect();
    for ((at_data, response), used) in queries.into_iter().zip(used) {
        assert!(guest.ended(response, used).good());
        let descriptor = guest.get(at_data + 8, 16);
        assert_eq!(descriptor[..8], 64_u64.to_be_bytes());
        assert_eq!(descriptor[8..13], [0, 0, 0, 8, 0], "8 blocks are mapped");
    }
}

#[test]
fn absent_targets_and_luns_are_answered() {
    let (mut guest, _file) = Guest::new();
    let inquiry = [0x12, 0, 0, 0, 96, 0];
    let room = [(DATA, 96, WRITE)];
    for lun in [
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 255, 0x40, 3, 0, 0, 0, 0],
        [0; 8],
        [9; 8],
    ] {
        let ended = guest.run_at(lun, &inquiry, &room);
        assert_eq!(
            (ended.code, ended.residual, ended.used),
            (3, 96, RESPONSE),
            "{lun:x?}"
        );
    }
    let ended = guest.run(at(0, 1), &inquiry, &room);
    assert!(ended.good());
    assert_eq!(guest.get(DATA, 1), [0x7f]);
    assert_eq!((ended.residual, ended.used), (60, RESPONSE + 36));
    assert_eq!(guest.run(at(0, 1), &[0; 6], &[]).sense(), (5, 0x25, 0));
    // The well known logical unit and a LUN of another form report the target's LUNs.
    let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0];
    for lun in [[0xc1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0xc1, 1, 0, 0, 0, 0]] {
        guest.put(DATA, &[0xff; 64]);
        assert!(guest.run_at(lun, &report, &[(DATA, 64, WRITE)]).good());
        assert_eq!(
            guest.get(DATA, 16),
            [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
    }
}

#[test]
fn buffers_that_are_too_small_are_an_overrun() {
    let (mut guest, file) = Guest::new();
    let ended = guest.run(at(0, 0), &read10(0, 2), &[(DATA, 1023, WRITE)]);
    assert_eq!((ended.code, ended.residual), (1, 1023));
    guest.put(DATA, &[1; 512]);
    let ended = guest.run(at(0, 0), &write10(0, 2), &[(DATA, 512, 0)]);
    assert_eq!((ended.code, ended.residual), (1, 512));
    assert_eq!(content(&file, 0, 512), [0; 512]);
    assert!(!guest.is_broken());
}

#[test]
fn failed_commands_return_sense_data() {
    let (mut guest, _file) = Guest::new();
    let beyond = guest.run(at(0, 0), &read10(BLOCKS as u32, 1), &[(DATA, 512, WRITE)]);
    assert_eq!(beyond.sense(), (5, 0x21, 0));
    assert_eq!(
        (beyond.sense.len(), beyond.residual, beyond.used),
        (18, 512, RESPONSE)
    );
    assert_eq!(guest.run(at(0, 0), &[0xff; 10], &[]).sense(), (5, 0x20, 0));
}

#[test]
fn the_driver_chooses_its_sizes() {
    let (mut guest, _file) = Guest::new();
    guest.scsi.reset();
    guest.scsi.write_config(20, &20u32.to_le_bytes());
    guest.scsi.write_config(24, &16u32.to_le_bytes());
    let mut word = [0; 4];
    guest.scsi.read_config(20, &mut word);
    assert_eq!(u32::from_le_bytes(word), 20);
    guest.put(RINGS * 3, &[0; 0x3000]);
    guest.request[0] = Driver::new(&guest.mem, 2, QUEUE_SIZE, RINGS * 3);
    let queue = guest.request[0].queue(true);
    guest.activate(0, vec![queue]);
    // The first command gets the power-on attention; the second has data directly after its short header.
    for sense in [18, 0] {
        let (header, response) = guest.frame(field(at(0, 0)), 1, 0, &write10(3, 1));
        guest.put(header.0 + 35, &[0; 16]);
        let chain = [(header.0, 35, 0), (DATA, 512, 0), (response.0, 32, WRITE)];
        guest.request[0].add(&chain);
        guest.request[0].kick();
        let (_, used) = guest.request[0].wait();
        let ended = guest.ended(response.0, used);
        assert_eq!(
            (ended.sense.len(), ended.used, ended.code),
            (sense, 32, 0),
            "{ended:?}"
        );
        assert_eq!(guest.get(response.0 + 32, 1), [0xee], "nothing beyond");
    }
    // A reset restores the default sizes.
    guest.scsi.reset();
    guest.scsi.read_config(20, &mut word);
    assert_eq!(u32::from_le_bytes(word), 96);
}

#[test]
fn completions_together_make_one_interrupt() {
    let (mut guest, script) = Guest::scripted(16, ErrorPolicy::Report);
    let before = guest.interrupts.queue();
    for block in 0..10 {
        guest.add(at(0, 0), &write10(block, 1), &[(DATA, 512, 0)]);
    }
    guest.request[0].kick();
    let made = Guest::made(&script, 10);
    guest.request[0].set_used_event(2 + 9);
    for call in &made {
        script.finish(call.tag, Ok(()));
    }
    for _ in 0..10 {
        guest.request[0].wait();
    }
    linger();
    assert_eq!(guest.interrupts.queue(), before + 1);
}

#[test]
fn without_a_free_tag_requests_wait_for_their_turn() {
    let (mut guest, script) = Guest::scripted(2, ErrorPolicy::Report);
    for block in 0..5 {
        guest.add(at(0, 0), &write10(block, 1), &[(DATA, 512, 0)]);
    }
    guest.request[0].kick();
    for done in 0..5 {
        let made = Guest::made(&script, (done + 2).min(5));
        linger();
        assert_eq!(script.made().len(), made.len());
        script.finish(made[done].tag, Ok(()));
        guest.request[0].wait();
    }
}

#[test]
fn compare_and_write_runs_alone() {
    let (mut guest, script) = Guest::scripted(16, ErrorPolicy::Report);
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x89, 1);
    guest.put(DATA, &[0; 1024]);
    guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    let (compare, _) = guest.add(at(0, 0), &cdb, &[(DATA, 1024, 0)]);
    let (last, _) = guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.add(at(0, 1), &write10(7, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    // Other units are not delayed.
    let made = Guest::made(&script, 2);
    linger();
    assert_eq!(script.made().len(), 2);
    assert_eq!([made[0].slot, made[1].slot], [0, 1]);
    script.finish(made[0].tag, Ok(()));
    guest.request[0].wait();
    let read = Guest::made(&script, 3)[2];
    linger();
    assert_eq!(script.made().len(), 3);
    // The read returns zeroes, as expected.
    script.finish(read.tag, Ok(()));
    let write = Guest::made(&script, 4)[3];
    script.finish(write.tag, Ok(()));
    assert_eq!(guest.request[0].wait().0, compare);
    let write = Guest::made(&script, 5)[4];
    script.finish(write.tag, Ok(()));
    assert_eq!(guest.request[0].wait().0, last);
    script.finish(made[1].tag, Ok(()));
    guest.request[0].wait();
}

#[test]
fn ordered_tasks_run_in_order_and_head_of_queue_tasks_first() {
    let (mut guest, script) = Guest::scripted(16, ErrorPolicy::Report);
    let lun = field(at(0, 0));
    for (block, attribute) in [(0, 0), (1, 1), (2, 0), (3, 2)] {
        guest.add_with(
            lun,
            block.into(),
            attribute,
            &write10(block, 1),
            &[(DATA, 512, 0)],
        );
    }
    guest.request[0].kick();
    let block = |made: &RecordedCall| match made.what {
        husk_disk::testing::CallKind::Write { offset, .. } => offset / 512,
        _ => panic!(),
    };
    let first = Guest::made(&script, 2);
    linger();
    assert_eq!(script.made().iter().map(block).collect::<Vec<_>>(), [0, 3]);
    for call in first {
        script.finish(call.tag, Ok(()));
    }
    let ordered = Guest::made(&script, 3)[2];
    linger();
    assert_eq!((script.made().len(), block(&ordered)), (3, 1));
    script.finish(ordered.tag, Ok(()));
    let last = Guest::made(&script, 4)[3];
    assert_eq!(block(&last), 2);
    script.finish(last.tag, Ok(()));
}

#[test]
fn a_cache_is_switched_off_after_older_writes_and_before_younger_ones() {
    use husk_disk::testing::CallKind;
    let (mut guest, script) = Guest::scripted(16, ErrorPolicy::Report);
    let list = [&[0, 0, 0, 0, 0x08, 0x12, 0][..], &[0; 17]].concat();
    guest.put(DATA, &list);
    let write = |guest: &mut Guest| guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    write(&mut guest);
    let select = [0x15, 0x10, 0, 0, list.len() as u8, 0];
    guest.add(at(0, 0), &select, &[(DATA, list.len() as u32, 0)]);
    write(&mut guest);
    guest.request[0].kick();
    let (offset, len, durable) = (0, 512, false);
    let written = CallKind::Write { offset, len, durable };
    // The flush covers the first write. A sync makes the second one durable.
    for (number, expected) in [written, CallKind::Sync, written, CallKind::Sync]
        .into_iter()
        .enumerate()
    {
        let made = Guest::made(&script, number + 1);
        linger();
        assert_eq!((script.made().len(), made[number].what), (number + 1, expected));
        script.finish(made[number].tag, Ok(()));
    }
    for _ in 0..3 {
        guest.request[0].wait();
    }
}
