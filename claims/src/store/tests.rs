use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::Duration;

use proptest::prelude::*;
use rustix::fs::{Mode, inotify};
use rustix::process::umask;
use rustix::thread::{CapabilitySet, UnshareFlags, capabilities, set_capabilities, unshare_unsafe};

use super::*;

fn new(name: &str, size: u64) -> NewClaim {
    NewClaim::new("default", name, size)
}

fn store() -> (tempfile::TempDir, ClaimStore) {
    let home = tempfile::tempdir().unwrap();
    let store = ClaimStore::at(home.path().join("volumes"));
    (home, store)
}

fn listed(store: &ClaimStore) -> Vec<String> {
    let claims = store.list().unwrap().into_iter();
    claims
        .map(|claim| claim.map_or_else(|error| error.to_string(), |claim| claim.name()))
        .collect()
}

#[test]
fn volumes_are_made_grown_copied_and_removed() {
    let (_home, store) = store();
    assert!(listed(&store).is_empty());
    store.create(&new("data", 5 * MIB + 1)).unwrap();
    let claim = store.get("default", "data").unwrap();
    assert_eq!((claim.size, claim.allocated, claim.in_use), (6 * MIB, 0, false));
    assert_eq!(claim.object.spec.size, Some(6 * MIB));
    assert!(matches!(
        store.create(&new("data", MIB)),
        Err(ClaimError::Exists(_))
    ));
    assert!(matches!(
        store.create(&new("small", 1)),
        Err(ClaimError::TooSmall)
    ));

    let image = File::options()
        .read(true)
        .write(true)
        .open(store.image("default", "data"))
        .unwrap();
    image.write_all_at(b"begin", 0).unwrap();
    image.write_all_at(b"end", 6 * MIB - 3).unwrap();
    // Edited by hand.
    let manifest = store.claim("default", "data").join(MANIFEST);
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(
        &manifest,
        text.replace("metadata:\n", "metadata:\n  labels: {a: b}\n"),
    )
    .unwrap();
    assert_eq!(store.resize("default", "data", 7 * MIB).unwrap(), 7 * MIB);
    let grown = store.get("default", "data").unwrap().object;
    assert_eq!(grown.spec.size, Some(7 * MIB));
    assert_eq!(grown.metadata.labels["a"], "b");
    assert!(matches!(
        store.resize("default", "data", MIB),
        Err(ClaimError::Shrinks { .. })
    ));
    store
        .copy(
            ("default", "data"),
            &NewClaim::new("test", "copy", 7 * MIB),
            &|_, _| {},
        )
        .unwrap();
    let copy = store.get("test", "copy").unwrap();
    assert_eq!(copy.size, 7 * MIB);
    assert!(copy.allocated <= MIB, "{}", copy.allocated);
    let read = File::open(store.image("test", "copy")).unwrap();
    let mut end = [0; 3];
    read.read_exact_at(&mut end, 6 * MIB - 3).unwrap();
    assert_eq!(&end, b"end");
    assert_eq!(listed(&store), ["data", "test/copy"]);

    store.remove("default", "data").unwrap();
    assert!(matches!(
        store.remove("default", "data"),
        Err(ClaimError::NotFound(_))
    ));
    assert_eq!(listed(&store), ["test/copy"]);
    assert!(!store.path.join("default").exists());
    assert_eq!(fs::read_dir(store.path.join(CHANGES)).unwrap().count(), 0);
}

#[test]
fn names_that_leave_their_place_are_refused() {
    let (home, store) = store();
    store.create(&NewClaim::new("test", "data", MIB)).unwrap();
    store.create(&new("data", MIB)).unwrap();
    let outside = home.path().join("outside");
    let outside = outside.to_str().unwrap();
    for (namespace, name) in [
        ("default", "../test/data"),
        ("default", outside),
        ("default/..", "data"),
        (".changes", "data"),
        ("default", ""),
        ("default", ".."),
    ] {
        assert!(!store.has(namespace, name));
        for done in [
            store.get(namespace, name).map(drop),
            store.create(&NewClaim::new(namespace, name, MIB)),
            store.copy((namespace, name), &new("copy", MIB), &|_, _| {}),
            store.resize(namespace, name, 2 * MIB).map(drop),
            store.relabel(namespace, name, &BTreeMap::new(), &BTreeMap::new()),
            store.begin_import(namespace, name).map(drop),
            store.abandon_import(namespace, name),
            store.remove(namespace, name),
        ] {
            assert!(matches!(done, Err(ClaimError::Name { .. })), "{name}: {done:?}");
        }
    }
    assert_eq!(listed(&store), ["data", "test/data"]);
}

#[test]
fn what_a_power_cut_leaves_is_removed_at_the_next_change() {
    let (_home, store) = store();
    store.create(&new("kept", MIB)).unwrap();
    let running = store.begin().unwrap();
    fs::write(running.path.join(IMAGE), "running").unwrap();
    let dead = store.path.join(CHANGES).join("dead");
    fs::create_dir(&dead).unwrap();
    fs::write(dead.join(IMAGE), "dead").unwrap();
    // Cut between the new size and the new claim file.
    File::options()
        .write(true)
        .open(store.image("default", "kept"))
        .unwrap()
        .set_len(2 * MIB)
        .unwrap();
    fs::write(store.claim("default", "kept").join("claim.new"), "half").unwrap();
    assert_eq!(listed(&store), ["kept"]);
    assert_eq!(store.get("default", "kept").unwrap().size, 2 * MIB);
    store.create(&new("other", MIB)).unwrap();
    assert!(!dead.exists() && running.path.join(IMAGE).exists());
    assert_eq!(store.resize("default", "kept", 2 * MIB).unwrap(), 2 * MIB);
    drop(running);
    assert_eq!(fs::read_dir(store.path.join(CHANGES)).unwrap().count(), 0);
}

#[test]
fn one_of_two_creators_wins() {
    let (_home, store) = store();
    let made = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| store.create(&new("data", MIB))))
            .collect();
        let results = threads.into_iter().map(|thread| thread.join().unwrap());
        results.filter(Result::is_ok).count()
    });
    assert_eq!(made, 1);
    assert_eq!(listed(&store), ["data"]);
    assert_eq!(fs::read_dir(store.path.join(CHANGES)).unwrap().count(), 0);
}

#[test]
fn volume_of_a_vm_is_neither_removed_nor_copied() {
    let (_home, store) = store();
    store.create(&new("data", MIB)).unwrap();
    let path = store.image("default", "data");
    let image = File::options().read(true).write(true).open(&path).unwrap();
    husk_volumes::lock_image(&image, &path, Sharing::Exclusive).unwrap();
    assert!(store.get("default", "data").unwrap().in_use);
    assert!(matches!(
        store.remove("default", "data"),
        Err(ClaimError::InUse(_))
    ));
    let copied = store.copy(("default", "data"), &new("copy", MIB), &|_, _| {});
    assert!(matches!(copied, Err(ClaimError::InUse(_))));
    assert_eq!(store.resize("default", "data", 2 * MIB).unwrap(), 2 * MIB);
    drop(image);
    store.remove("default", "data").unwrap();
}

#[test]
fn the_removal_of_a_volume_makes_no_directory() {
    let (_home, store) = store();
    store.create(&new("data", MIB)).unwrap();
    let events = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    let changes = store.path.join(CHANGES);
    inotify::add_watch(&events, &changes, inotify::WatchFlags::CREATE).unwrap();
    store.remove("default", "data").unwrap();
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let made = inotify::Reader::new(events, &mut buffer).next().map(drop);
    assert_eq!(made, Err(Errno::AGAIN));
    assert_eq!(fs::read_dir(&changes).unwrap().count(), 0);
}

/// Runs `change` where nobody can open a directory that it makes. Ends the tests if it does not end: each round of an
/// endless loop makes a directory.
fn without_access<T: Send + 'static>(change: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        // SAFETY: the thread only gets a umask of its own.
        unsafe { unshare_unsafe(UnshareFlags::FS) }.unwrap();
        umask(Mode::RWXU);
        let mut sets = capabilities(None).unwrap();
        sets.effective = CapabilitySet::empty();
        set_capabilities(None, sets).unwrap();
        sender.send(change())
    });
    receiver
        .recv_timeout(Duration::from_secs(5))
        .unwrap_or_else(|_| std::process::abort())
}

#[test]
fn a_directory_that_cannot_be_opened_is_an_error() {
    let (_home, store) = store();
    drop(store.begin_import("default", "other").unwrap());
    let changes = store.changes().unwrap();
    let change = store.clone();
    let begun = without_access(move || change.begin().map(drop));
    assert!(matches!(begun, Err(ClaimError::Io { .. })), "{begun:?}");
    assert_eq!(fs::read_dir(changes).unwrap().count(), 0);
    let made = store.path.join(".imports/default:data");
    let begun = without_access(move || store.begin_import("default", "data").map(drop));
    assert!(matches!(begun, Err(ClaimError::Io { .. })), "{begun:?}");
    fs::remove_dir(made).unwrap();
}

#[test]
fn a_copy_needs_space_only_where_there_are_no_reflinks() {
    let (_home, store) = store();
    for name in ["from", "to"] {
        store.create(&new(name, MIB)).unwrap();
    }
    let open = |name| {
        let path = store.image("default", name);
        File::options().read(true).write(true).open(path).unwrap()
    };
    let (from, to) = (open("from"), open("to"));
    from.write_all_at(b"data", 0).unwrap();
    let fill = |allocated, works: bool| {
        let reflink = |_: &File, _: &File| match works {
            true => Ok(()),
            false => Err(Errno::OPNOTSUPP.into()),
        };
        store.fill(&from, &to, allocated, reflink, &|_| {})
    };
    fill(u64::MAX, true).unwrap();
    assert!(matches!(fill(u64::MAX, false), Err(ClaimError::NoSpace { .. })));
    let mut copied = [0; 4];
    to.read_exact_at(&mut copied, 0).unwrap();
    assert_eq!(copied, [0; 4]);
    fill(4096, false).unwrap();
    to.read_exact_at(&mut copied, 0).unwrap();
    assert_eq!(&copied, b"data");
}

#[test]
fn damaged_claim_costs_itself_only() {
    let (_home, store) = store();
    store.create(&new("good", MIB)).unwrap();
    for (name, text) in [
        ("bad", "kind: [".to_owned()),
        ("wrong", new("good", MIB).manifest().unwrap()),
    ] {
        store.create(&new(name, MIB)).unwrap();
        fs::write(store.claim("default", name).join(MANIFEST), text).unwrap();
    }
    let listed = listed(&store);
    assert!(listed[0].contains("default/bad/claim.yaml: "), "{listed:?}");
    assert_eq!(listed[1], "good");
    assert!(
        listed[2].ends_with("it is the claim default/good and not default/wrong"),
        "{listed:?}"
    );
    store.remove("default", "bad").unwrap();
}

proptest! {
    #[test]
    fn claim_files_never_panic(text in "\\PC{0,200}") {
        let _ = claim::parse(&text, "default", "data");
    }
}
