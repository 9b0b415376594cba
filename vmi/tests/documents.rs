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
