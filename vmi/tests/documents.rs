//! Several documents in one manifest.

mod common;

use common::base;
use husk_vmi::{Loaded, load};
use serde_json::json;

#[test]
fn json_objects_need_nothing_between_them() {
    let (mut other, mut wrong) = (base(), base());
    other["metadata"]["name"] = json!("other");
    wrong["spec"] = json!({});
    let compact = format!("{}{other}", base());
    let pretty = [base(), other].map(|vm| serde_json::to_string_pretty(&vm).unwrap());
    for text in [compact, pretty.join("\n"), pretty.join("\n---\n")] {
        let names: Vec<_> = load(&text)
            .unwrap()
            .into_iter()
            .map(|document| match document {
                Loaded::Vmi(vmi) => vmi.document.unwrap(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(names, ["testvmi", "other"]);
    }
    let torn = load("{\"a\": 1}\n{\"b\": [1, 2}").unwrap_err().to_string();
    assert!(torn.starts_with("line 2, column "), "{torn}");
}

#[test]
fn json_may_have_characters_that_yaml_refuses() {
    let odd = "\u{7f}\u{80}\u{9f}\u{fffe}\u{ffff}";
    let mut manifest = base();
    manifest["metadata"]["annotations"] = json!({"a": odd});
    let other = "kind: Service\nmetadata: {name: other}\n";
    for text in [
        manifest.to_string(),
        format!("{manifest}{}", json!({"kind": "Service"})),
        format!("{manifest}\n---\n{other}"),
    ] {
        let Loaded::Vmi(vmi) = load(&text).unwrap().remove(0) else {
            panic!("{text}")
        };
        assert_eq!(vmi.annotations["a"], odd);
    }
    assert_eq!(load(&format!("{manifest}\n---\n{other}")).unwrap().len(), 2);
}

#[test]
fn json_has_the_limits_of_yaml() {
    let line = |text: &str| load(text).unwrap_err().to_string();
    assert_eq!(
        line("{\"a\": 1}\n {\"b\":\n{\"a b\": 1, \"a b\": 2}}"),
        "line 3, column 16: duplicate mapping key: a b not allowed here"
    );
    for depth in [64, 65, 66, 100_000] {
        for (open, close) in [("{\"a\": ", "}"), ("{\"a\": [", "]}")] {
            let levels = depth / open.matches(['{', '[']).count();
            let text = format!("{}0{}", open.repeat(levels), close.repeat(levels));
            let json = line(&text);
            let yaml = line(&text.replacen("\"a\"", "a", 1));
            let message = "nested deeper than the limit of 64 levels";
            assert_eq!(
                json.ends_with(message),
                yaml.ends_with(message),
                "{depth}: {json}\n{yaml}"
            );
        }
    }
    let many = format!("{{\"a\": [{}0]}}", "0,".repeat(300_000));
    assert_eq!(
        line(&many),
        "line 1, column 500001: the manifest is too complex: split it into several files"
    );
    assert_eq!(line("{\"a\": 1e999}"), "line 1, column 11: number out of range");
    for text in ["{\"a\": 1}\nb: 2", "{\"a\": 1} x", "{\"a\": 1}: 2"] {
        let line = line(text);
        assert!(line.starts_with("line "), "{line}");
    }
}

#[test]
fn a_fault_names_its_document_where_there_are_several() {
    let object = |kind: &str, metadata: &str, spec: &str| {
        format!("apiVersion: kubevirt.io/v1\nkind: {kind}\nmetadata: {metadata}\nspec: {spec}\n")
    };
    let bad = |metadata: &str| object("VirtualMachineInstance", metadata, "{}");
    let only = load(&bad("{name: a}")).unwrap_err().to_string();
    assert_eq!(
        only,
        "spec.domain: Required value: spec.domain in body is required"
    );
    let text = [
        "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n".to_owned(),
        bad("{name: a}"),
        bad("{name: a, namespace: prod}"),
        bad("{name: twice}"),
        bad("{name: twice}"),
        bad("{}"),
        "kind: List\nitems: [{kind: VirtualMachine}, 3]\n".to_owned(),
    ];
    let all = load(&text.join("---\n")).unwrap_err().to_string();
    let places: Vec<&str> = all.lines().filter_map(|line| line.split(": ").next()).collect();
    assert_eq!(
        places,
        [
            "a",
            "prod/a",
            "twice (document 4)",
            "twice (document 5)",
            "document 6",
            "document 6",
            "document 7, items[0]",
            "document 7, items[1]",
        ]
    );
}
